"""The command line: ``python -m tracegrad inspect FILE`` and ``--version``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence

from tracegrad._jax.compat import versions
from tracegrad._version import __version__
from tracegrad.saving.errors import ArtefactError

SOUND, REFUSED, NOT_READ = 0, 1, 2


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
        description="Shows the functions, Variables, custom calls and sizes of files as JSON, "
        "without reading programs and values.",
    )
    command.add_argument("files", metavar="FILE", nargs="+")
    given = parser.parse_args(arguments)
    return max(map(_report, given.files))


def _report(path: str) -> int:
    """Prints what is in a file, or why it cannot be read; returns the exit status."""
    try:
        # Imported here, as it needs the packages of tracegrad[save], and --version does not.
        inspection = importlib.import_module("tracegrad.saving.inspection")
        sys.stdout.write(f"{json.dumps(inspection.inspect(path), indent=2)}\n")
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


if __name__ == "__main__":
    sys.exit(main())
