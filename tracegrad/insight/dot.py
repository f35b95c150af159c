"""A graph in Graphviz's language; its grammar: https://graphviz.org/doc/info/lang.html."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tracegrad.insight.drawing import Box, draw
from tracegrad.insight.gradient_flow import Flow, RegionFlow

COLOURS = {
    Flow.FLOWS: "#d8f0dd",
    Flow.CHANGED: "#e5d8fb",
    Flow.CUT: "#fbd3d0",
    Flow.UNREACHED: "#fbe9c3",
    Flow.NONE: "#f3f4f6",
    Flow.REPLACED: "#f3f4f6",
    Flow.UNKNOWN: "#ffffff",
}


def to_dot(flow: RegionFlow) -> str:
    """A ``digraph``, coloured by what becomes of the gradient."""
    drawing = draw(flow, repeat=False)
    root = _Frame("")
    for box in drawing.boxes:
        frame = root
        for name in box.frame:
            frame = frame.inner.setdefault(name, _Frame(name))
        frame.boxes.append(box)
    types = {box.name: box.outputs for box in drawing.boxes}
    lines = [
        f"digraph {_quoted(flow.graph.name)} {{",
        '  graph [fontname="Helvetica" rankdir=TB]',
        '  node [fontname="Helvetica" fontsize=11 shape=box style="rounded,filled" '
        'fillcolor=white color="#8c959f"]',
        '  edge [fontname="Helvetica" fontsize=9 color="#8c959f"]',
        *_lines(root, "  ", "cluster"),
    ]
    for arrow in drawing.arrows:
        _, type_text = types[arrow.source][arrow.output]
        lines.append(f"  {arrow.source} -> {arrow.target} [label={_quoted(type_text)}]")
    return "\n".join([*lines, "}"])


@dataclass
class _Frame:
    name: str
    boxes: list[Box] = field(default_factory=list)
    inner: dict[str, _Frame] = field(default_factory=dict)


def _lines(frame: _Frame, indent: str, cluster: str) -> Iterator[str]:
    for box in frame.boxes:
        yield f"{indent}{box.name} [{_attributes(box)}]"
    for number, inner in enumerate(frame.inner.values()):
        name = f"{cluster}_{number}"
        yield f"{indent}subgraph {name} {{"
        yield f'{indent}  label={_quoted(inner.name)} style=rounded color="#c3c9d0" fontsize=11'
        yield from _lines(inner, indent + "  ", name)
        yield f"{indent}}}"


def _attributes(box: Box) -> str:
    text = f"label={_quoted(box.text)}"
    if box.flow is None:
        return f"{text} shape=plain"
    text += f" fillcolor={_quoted(COLOURS[box.flow])}"
    origin = box.occurrence.origin if box.occurrence is not None else None
    return text if origin is None else f"{text} tooltip={_quoted(str(origin))}"


def _quoted(text: str) -> str:
    """A string of the language. A backslash would start an escape (``\\N`` is the node's name)."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'
