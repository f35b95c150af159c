"""HTML of reports for notebooks: a headline, and text that folds.

Text takes the colour of the surrounding text, so it is readable on light and on dark pages.
"""

from __future__ import annotations

import html


def of_text(text: str) -> str:
    """Returns text as HTML: its first line is the headline, the other lines fold. Up to 40 other
    lines are unfolded at first."""
    headline, *lines = text.splitlines()
    style = "margin:0;line-height:1.35;white-space:pre"
    title = "1 line" if len(lines) == 1 else f"{len(lines)} lines"
    return (
        f'<div style="line-height:1.5"><b>{html.escape(headline)}</b>'
        f"<details{' open' if len(lines) <= 40 else ''}>"
        f'<summary style="cursor:pointer">{title}</summary>'
        '<div style="overflow-x:auto;margin:0 0 .4em 1.5em">'
        f'<pre style="{style}">{html.escape(chr(10).join(lines))}</pre></div></details></div>'
    )
