"""HTML of reports for notebooks: a headline, sections that fold, tables.

Text takes the colour of the surrounding text, so it is readable on light and on dark pages.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Sequence


def report(headline: str, *parts: str) -> str:
    """`headline` is plain text; `parts` are HTML."""
    return f'<div style="line-height:1.5"><b>{html.escape(headline)}</b>{"".join(parts)}</div>'


def of_text(text: str) -> str:
    """Returns text as a report: its first line is the headline, the other lines fold. Up to 40
    other lines are unfolded at first."""
    headline, *lines = text.splitlines()
    style = "margin:0;line-height:1.35;white-space:pre"
    body = f'<pre style="{style}">{html.escape(chr(10).join(lines))}</pre>'
    title = "1 line" if len(lines) == 1 else f"{len(lines)} lines"
    return report(headline, section(title, body, is_open=len(lines) <= 40))


def section(title: str, body: str, *, is_open: bool = False) -> str:
    """Returns a section that folds; `title` and `body` are HTML."""
    return (
        f"<details{' open' if is_open else ''}>"
        f'<summary style="cursor:pointer">{title}</summary>'
        f'<div style="overflow-x:auto;margin:0 0 .4em 1.5em">{body}</div></details>'
    )


def table(rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of rows of plain text; the first row is the head."""
    style = 'style="text-align:left;padding:1px 1.5em 1px 0;white-space:nowrap"'
    lines = [
        "".join(f"<{tag} {style}>{html.escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(itertools.chain(["th"], itertools.repeat("td")), rows, strict=False)
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="border-collapse:collapse;margin:0">{body}</table>'
