"""The text of a graph as one SVG picture, with the colour of the gradient behind each operation."""

from __future__ import annotations

import html

from tracegrad.insight.gradient_flow import Flow, RegionFlow
from tracegrad.ir import Node
from tracegrad.ir.occurrence import Path
from tracegrad.ir.text import format_graph

_COLOURS = {
    Flow.FLOWS: "#d8f0dd",
    Flow.CHANGED: "#e5d8fb",
    Flow.CUT: "#fbd3d0",
    Flow.UNREACHED: "#fbe9c3",
    Flow.NONE: "#f3f4f6",
    Flow.REPLACED: "#f3f4f6",
}
_LEGEND = {
    Flow.FLOWS: "the gradient flows",
    Flow.CHANGED: "a custom rule changes it",
    Flow.CUT: "it ends here",
    Flow.UNREACHED: "none arrives",
    Flow.NONE: "nothing to differentiate",
}
_WHITE = "#fff"
_WIDTH, _HEIGHT = 6.7, 18  # of a letter and of a line, in pixels
_STYLE = 'font-family="ui-monospace,Menlo,Consolas,monospace" font-size="11"'


def to_svg(flow: RegionFlow) -> str:
    """An SVG document: one line for each line of the graph's text, and a legend."""
    numbers = list(Flow)
    used: set[Flow] = set()

    def marked(path: Path, node: Node, left: str, types: str, place: str) -> str:
        kind = flow.along(path).flows[node]
        used.add(kind)
        return f"\0{numbers.index(kind)}\0{left}  {types}  {place}"

    lines: list[tuple[str, str]] = []
    for line in format_graph(flow.graph, marked).splitlines():
        before, *marks = line.split("\0")
        colour = _COLOURS.get(numbers[int(marks[0])], _WHITE) if marks else _WHITE
        lines.append(((before + "".join(marks[1:])).rstrip(), colour))
    lines.append(("", _WHITE))
    lines += [(f"  {words}", _COLOURS[kind]) for kind, words in _LEGEND.items() if kind in used]
    width = round(_WIDTH * (2 + max(len(line) for line, _ in lines)))
    height = _HEIGHT * len(lines) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" {_STYLE}>',
        f"<title>{html.escape(flow.graph.name)}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for number, (line, colour) in enumerate(lines):
        indent = len(line) - len(line.lstrip(" │"))
        x, y = round(_WIDTH * (1 + indent)) - 3, _HEIGHT * number + 4
        if colour != _WHITE:
            length = round(_WIDTH * (len(line) - indent)) + 6
            parts.append(
                f'<rect x="{x}" y="{y}" width="{length}" height="{_HEIGHT - 2}" rx="3" '
                f'fill="{colour}"/>'
            )
        words = html.escape(line)
        parts.append(f'<text x="{_WIDTH}" y="{y + 12}" xml:space="preserve">{words}</text>')
    return "\n".join([*parts, "</svg>\n"])
