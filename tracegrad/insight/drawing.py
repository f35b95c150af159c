"""Draws the text of a graph as an SVG picture; background colours tell the gradient's flow."""

from __future__ import annotations

import html

from tracegrad.insight.colours import LOOKS, WORDS
from tracegrad.insight.gradient_flow import Flow, RegionFlow
from tracegrad.ir import Node
from tracegrad.ir.occurrence import Path
from tracegrad.ir.text import format_graph

_WIDTH, _HEIGHT = 6.7, 18  # the width of a letter and the height of a line, in pixels
_STYLE = 'font-family="ui-monospace,Menlo,Consolas,monospace" font-size="11"'


def to_svg(flow: RegionFlow) -> str:
    """Returns an SVG document: one line for each line of the graph's text, and a legend."""
    used: set[Flow] = set()

    def marked(path: Path, node: Node, left: str, types: str, place: str) -> str:
        kind = flow.along(path).flows[node]
        used.add(kind)
        return f"\0{kind.value}\0{left}  {types}  {place}"

    lines: list[tuple[str, str | None]] = []  # text and background colour
    for line in format_graph(flow.graph, marked).splitlines():
        before, *marks = line.split("\0")
        fill = LOOKS[Flow(marks[0])].fill or None if marks else None
        lines.append(((before + "".join(marks[1:])).rstrip(), fill))
    lines.append(("", None))
    lines += [(f"  {words}", LOOKS[kind].fill) for kind, words in WORDS.items() if kind in used]
    width = round(_WIDTH * (2 + max(len(line) for line, _ in lines)))
    height = _HEIGHT * len(lines) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" {_STYLE}>',
        f"<title>{html.escape(flow.graph.name)}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for number, (line, fill) in enumerate(lines):
        indent = len(line) - len(line.lstrip(" │"))
        x, y = round(_WIDTH * (1 + indent)) - 3, _HEIGHT * number + 4
        if fill is not None:
            length = round(_WIDTH * (len(line) - indent)) + 6
            parts.append(
                f'<rect x="{x}" y="{y}" width="{length}" height="{_HEIGHT - 2}" rx="3" '
                f'fill="{fill}"/>'
            )
        words = html.escape(line)
        parts.append(f'<text x="{_WIDTH}" y="{y + 12}" xml:space="preserve">{words}</text>')
    return "\n".join([*parts, "</svg>\n"])
