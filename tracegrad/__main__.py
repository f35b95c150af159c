"""The command line: ``python -m tracegrad inspect FILE`` and ``--version``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracegrad._jax.compat import versions
from tracegrad._version import __version__
from tracegrad.ir.wording import table
from tracegrad.saving.errors import ArtefactError

SOUND, REFUSED, NOT_READ = 0, 1, 2

Row = Sequence[str]
Found = Mapping[str, Any]  # the result of `inspect`


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name.

    Args:
        arguments: the arguments of the command line, without the program's name. Default: those of
            the process.

    Returns:
        The exit status: 0; 1 if a file is refused; 2 if a file cannot be read at all.

    Raises:
        SystemExit: the arguments are wrong, or ask for help or the version.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tracegrad",
        description="Inspects files that tracegrad.save has written.",
        epilog="Exit status: 0; 1 if a file is refused; 2 if one cannot be read, or on wrong use",
    )
    running = ", ".join(f"{name} {version}" for name, version in versions().items())
    shown = f"tracegrad {__version__}, {running.replace('jax ', 'JAX ')}"
    parser.add_argument("--version", action="version", version=shown)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "inspect",
        help="show the contents of a file",
        description="Shows the functions, Variables, custom calls and sizes of files, without "
        "reading programs and values.",
    )
    command.add_argument("--json", action="store_true", help="print one JSON document per file")
    command.add_argument("files", metavar="FILE", nargs="+")
    given = parser.parse_args(arguments)
    show = _as_json if given.json else _as_tables
    return max(_report(path, show) for path in given.files)


def _report(path: str, show: Callable[[Found], str]) -> int:
    """Prints what is in a file, or why it cannot be read; returns the exit status."""
    try:
        # Imported here, as it needs the packages of tracegrad[save], and --version does not.
        inspection = importlib.import_module("tracegrad.saving.inspection")
        sys.stdout.write(f"{show(inspection.inspect(path))}\n")
        sys.stdout.flush()
    except ArtefactError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ImportError as error:
        sys.stderr.write(f"{error}\n")
        return NOT_READ
    except OSError as error:
        sys.stderr.write(f"{path}: {error.strerror or error}\n")
        return NOT_READ
    return SOUND


def _as_json(found: Found) -> str:
    return json.dumps(found, indent=2)


def _as_tables(found: Found) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [f"{found['path']}: {found['size']:,} bytes, format {found['format']}, by {packages}"]
    for rows in (_functions(found), _variables(found)):
        if len(rows) > 1:
            lines += ["", *table(rows, right=[len(rows[0]) - 1])]
    return "\n".join(lines)


def _functions(found: Found) -> list[Row]:
    keys = [each["key"] for each in found["variables"]]
    rows: list[Row] = [
        ("function", "gradients", "platforms", "reads", "assigns", "programs", "calls", "bytes")
    ]
    for each in found["functions"]:
        where = f" where {', '.join(each['constraints'])}" if each["constraints"] else ""
        names = [each["platforms"], *([keys[i] for i in each[k]] for k in ("reads", "assigns"))]
        calls = sorted({call for calls in each["calls"].values() for call in calls})
        lists = [", ".join(names) or "-" for names in (*names, [str(len(each["calls"]))], calls)]
        order = f"to order {each['gradient_order']}"
        rows.append((each["signature"] + where, order, *lists, f"{each['size']:,}"))
    return rows


def _variables(found: Found) -> list[Row]:
    rows: list[Row] = [("Variable", "type", "trainable", "bytes")]
    for each in found["variables"]:
        key, name, array = each["key"], each["name"], each["array"]
        kind = f"{array['dtype']}[{','.join(map(str, array['shape']))}]"
        trainable = "yes" if each["trainable"] else "no"
        rows.append(
            (key if name == key else f"{key} ({name})", kind, trainable, f"{each['size']:,}")
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
