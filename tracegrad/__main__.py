"""The command line: ``python -m tracegrad inspect FILE``, ``verify FILE`` and ``--version``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracegrad._jax.compat import versions
from tracegrad._version import __version__
from tracegrad.ir.wording import table
from tracegrad.saving.errors import ArtefactError, printable
from tracegrad.saving.inspection import inspect
from tracegrad.saving.structure import Leaf
from tracegrad.saving.verification import verify

try:  # for tables in a terminal, where it is installed
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError:
    Console = None  # type: ignore[assignment, misc]

SOUND, REFUSED, NOT_READ = 0, 1, 2

Row = Sequence[str]
Found = Mapping[str, Any]  # what `inspect` returns


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: those of the command line, without the program's name. Default: of the process.

    Returns:
        The exit status: 0, or 1 if a file is no whole artefact, or 2 if one cannot be read at all.

    Raises:
        SystemExit: the arguments are none that it knows, or ask for help.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tracegrad",
        description="Looks into files that tracegrad.save wrote.",
        epilog="Exit status: 0; 1 if a file is refused; 2 if one cannot be read, or on wrong use",
    )
    running = ", ".join(f"{name} {version}" for name, version in versions().items())
    parser.add_argument(
        "--version",
        action="version",
        version=f"tracegrad {__version__}, {running.replace('jax ', 'JAX ')}",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspects = commands.add_parser(
        "inspect",
        help="show what is in a file",
        description="Shows the functions, Variables and arrays of files, and the functions' "
        "graphs. Programs and values are not read.",
    )
    inspects.add_argument("--json", action="store_true", help="as JSON, one document for each file")
    verifies = commands.add_parser(
        "verify",
        help="check all of a file",
        description="Checks every byte of files, and has XLA parse the programs in a process of "
        "its own, which may die of them. Refuses programs that call code outside of them, but for "
        "what JAX itself needs.",
    )
    for command in (inspects, verifies):
        command.add_argument("files", metavar="FILE", nargs="+")
    given = parser.parse_args(arguments)
    status = SOUND
    for path in given.files:
        if given.command == "verify":
            status = max(status, _report(path, _verify))
        else:
            status = max(status, _report(path, _as_json if given.json else _show))
    return status


def _report(path: str, work: Callable[[str], None]) -> int:
    try:
        work(path)
    except ArtefactError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    except BrokenPipeError:  # nobody reads on, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SOUND
    except OSError as error:
        sys.stderr.write(f"{printable(path)}: {error.strerror or error}\n")
        return NOT_READ
    except ImportError as error:
        sys.stderr.write(f"{error}\n")
        return NOT_READ
    return SOUND


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _verify(path: str) -> None:
    manifest = verify(path)
    programs = sum(len(function.programs) for function in manifest.functions)
    counts = f"{_count(len(manifest.functions), 'function')} in {_count(programs, 'program')}"
    _say(f"{printable(path)}: sound: {counts}, {_count(len(manifest.variables), 'Variable')}")


def _as_json(path: str) -> None:
    _say(json.dumps(inspect(path), indent=2))


def _show(path: str) -> None:
    found = inspect(path)
    if Console is not None and sys.stdout.isatty():
        _show_rich(found)
    else:
        _say("\n".join(_plain(found)))


# ------------------------------------------------------------------------------ what is shown


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _heading(found: Found) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    version = f"version {found['format_version']} of the format"
    return f"{found['path']}: {found['size']:,} bytes, {version}, written by {packages}"


def _functions(found: Found) -> list[Row]:
    rows: list[Row] = [("function", "gradients", "platforms", "reads", "assigns", "calls")]
    for each in found["functions"]:
        names = (each[what] for what in ("platforms", "reads", "assigns", "calls"))
        order = f"to order {each['gradient_order']}"
        where = f" where {', '.join(each['constraints'])}" if each["constraints"] else ""
        rows.append((each["signature"] + where, order, *(", ".join(x) or "-" for x in names)))
    return rows


def _variables(found: Found) -> list[Row]:
    rows: list[Row] = [("Variable", "type", "trainable", "bytes")]
    for each in found["variables"]:
        key, name = each["key"], each["name"]
        kind, trainable = str(Leaf(each["dtype"], each["shape"])), each["trainable"]
        shown = key if name == key else f"{key} ({name})"
        rows.append((shown, kind, "yes" if trainable else "no", f"{each['size']:,}"))
    return rows


def _arrays(found: Found) -> list[Row]:
    rows = [(each["name"], f"{each['size']:,}", each["sha256"]) for each in found["arrays"]]
    return [("array", "bytes", "SHA-256"), *rows]


def _tables(found: Found) -> list[list[Row]]:
    tables = [_functions(found), _variables(found), _arrays(found)]
    return [[[printable(cell) for cell in row] for row in rows] for rows in tables if len(rows) > 1]


def _graphs(found: Found) -> list[tuple[str, str]]:
    return [
        (printable(f"graph of {each['name']}"), printable(each["graph"].rstrip()))
        for each in found["functions"]
    ]


def _plain(found: Found) -> list[str]:
    lines = [printable(_heading(found))]
    for rows in _tables(found):
        numbers = [i for i, title in enumerate(rows[0]) if title == "bytes"]
        lines += ["", *table(rows, right=numbers)]
    for title, text in _graphs(found):
        lines += ["", title, text]
    return lines


def _show_rich(found: Found) -> None:
    # As Text everywhere: names from a file are no markup.
    console = Console()
    console.print(Text(printable(_heading(found)), "bold"))
    for rows in _tables(found):
        table = Table()
        for title in rows[0]:
            table.add_column(
                title, justify="right" if title == "bytes" else "left", overflow="fold"
            )
        for row in rows[1:]:
            table.add_row(*map(Text, row))
        console.print(table)
    for title, text in _graphs(found):
        console.rule(Text(title))
        console.print(Text(text), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
