"""How every benchmark prints: one table, in Markdown, and what it ran on."""

from __future__ import annotations

import os
import platform
import sys

import jax


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Columns are as wide as their widest cell; all but the first are right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    rules = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(
        f"{title}\nJAX {jax.__version__}, Python {platform.python_version()}, "
        f"{jax.default_backend()}, {cores} cores\n"
    )
    print("\n".join([line(header), line(rules), *map(line, rows)]))
    sys.stdout.flush()
