"""A graph as boxes and arrows, in the languages of programs that draw: Graphviz, Model Explorer.

Regions and scopes are boxes in a frame. A call with regions is a frame with two boxes of its own:
one that its operands go into, and from which the regions take their inputs, and one that their
results go into.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracegrad import _jax
from tracegrad.insight.gradient_flow import Flow, RegionFlow
from tracegrad.insight.parts import parts_of
from tracegrad.ir import Atom, Node, Occurrence, Value
from tracegrad.ir.occurrence import Path
from tracegrad.ir.text import label, parameters

_COLOURS = {
    Flow.FLOWS: "#d8f0dd",
    Flow.CHANGED: "#e5d8fb",
    Flow.CUT: "#fbd3d0",
    Flow.UNREACHED: "#fbe9c3",
    Flow.NONE: "#f3f4f6",
    Flow.REPLACED: "#f3f4f6",
    Flow.UNKNOWN: "#ffffff",
}

Frame = tuple[str, ...]  # the names of the frames around a box, from the outside in


@dataclass(frozen=True)
class Box:
    """An operation, an input or constant, or one end of a call.

    `outputs` are the names and types of what arrows out of it carry.
    """

    name: str
    text: str
    frame: Frame
    outputs: tuple[tuple[str, str], ...] = ()
    flow: Flow | None = None  # None for what is no operation
    occurrence: Occurrence | None = None


@dataclass(frozen=True)
class Arrow:
    """From the k-th output of one box to the i-th input of another."""

    source: str
    output: int
    target: str
    input: int


_Ends = dict[Value, tuple[str, int]]  # a value -> the box that it comes from, and which output


class Drawing:
    """The boxes and arrows of a graph.

    Args:
      flow: the flow of gradients through it.
      repeat: whether a region that is entered from several places is drawn in each of them.
    """

    def __init__(self, flow: RegionFlow, *, repeat: bool):
        self.boxes: list[Box] = []
        self.arrows: list[Arrow] = []
        self._repeat = repeat
        self._frames: Counter[Frame] = Counter()
        self._drawn: set[RegionFlow] = set()
        ends: _Ends = {}
        for value in flow.graph.inputs:
            ends[value] = self._box(flow.graph.names[value], (), [value], flow.graph.names), 0
        self._region(flow, (), (), ends)
        self._lead(self._box("return", ()), flow.graph.outputs, ends)

    def _box(
        self,
        text: str,
        frame: Frame,
        outputs: Sequence[Value] = (),
        names: Mapping[Value, str] | None = None,
        flow: Flow | None = None,
        occurrence: Occurrence | None = None,
    ) -> str:
        name = f"n{len(self.boxes)}"
        types = tuple(((names or {})[v], _jax.type_text(v.aval)) for v in outputs)
        self.boxes.append(Box(name, text, frame, types, flow, occurrence))
        return name

    def _lead(self, target: str, values: Sequence[Atom], ends: _Ends) -> None:
        """Draws the arrows to a box that values go into."""
        for i, value in enumerate(values):
            if isinstance(value, Value):
                self.arrows.append(Arrow(*ends[value], target, i))

    def _region(self, flow: RegionFlow, path: Path, frame: Frame, ends: _Ends) -> None:
        """Draws the constants and nodes of a graph; `ends` has its inputs, and gets the rest."""
        for value in flow.graph.constants:
            ends[value] = self._box(flow.graph.names[value], frame, [value], flow.graph.names), 0
        parts, _ = parts_of(flow.graph)
        for node, part in zip(flow.graph.nodes, parts, strict=True):
            inside = (*frame, *part)
            regions = flow.regions.get(node, {})
            last = self._node(node, flow, path, inside, regions, ends)
            ends.update((value, (last, k)) for k, value in enumerate(node.outputs))

    def _node(
        self,
        node: Node,
        flow: RegionFlow,
        path: Path,
        frame: Frame,
        regions: dict[str, RegionFlow],
        ends: _Ends,
    ) -> str:
        """Draws a node; returns the box that its results come from."""
        occurrence, kind = Occurrence(path, node), flow.flows[node]
        text = label(node)
        known = bool(regions) and self._drawn.issuperset(regions.values())
        if not regions or (known and not self._repeat):
            text += " (as above)" if known else ""
            name = self._box(text, frame, node.outputs, flow.graph.names, kind, occurrence)
            self._lead(name, node.inputs, ends)
            return name
        around = self._fresh((*frame, node.name))
        inputs = [value for inner in regions.values() for value in inner.graph.inputs]
        names = {v: inner.graph.names[v] for inner in regions.values() for v in inner.graph.inputs}
        entry = self._box(text, around, inputs, names, kind, occurrence)
        self._lead(entry, node.inputs, ends)
        results = f"{node.name}: results"
        leave = self._box(results, around, node.outputs, flow.graph.names, kind)
        first = 0
        for name, inner in regions.items():
            self._drawn.add(inner)
            within: _Ends = {v: (entry, first + i) for i, v in enumerate(inner.graph.inputs)}
            first += len(inner.graph.inputs)
            place = self._fresh((*around, name)) if len(regions) > 1 else around
            self._region(inner, (*path, (node, name)), place, within)
            self._lead(leave, inner.graph.outputs, within)
        return leave

    def _fresh(self, frame: Frame) -> Frame:
        """A frame of its own for a call, where others of its name may stand beside it."""
        self._frames[frame] += 1
        count = self._frames[frame]
        return frame if count == 1 else (*frame[:-1], f"{frame[-1]} ({count})")


# --------------------------------------------------------------------------------------- Graphviz


def to_dot(flow: RegionFlow) -> str:
    """A ``digraph`` of Graphviz's language (https://graphviz.org/doc/info/lang.html), coloured by
    what becomes of the gradient."""
    drawing = Drawing(flow, repeat=False)
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
    text += f" fillcolor={_quoted(_COLOURS[box.flow])}"
    origin = box.occurrence.origin if box.occurrence is not None else None
    return text if origin is None else f"{text} tooltip={_quoted(str(origin))}"


def _quoted(text: str) -> str:
    """A string of the language. A backslash would start an escape (``\\N`` is the node's name)."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'


# --------------------------------------------------------------------------------- Model Explorer


def to_graphs(flow: RegionFlow) -> list[dict[str, Any]]:
    """The JSON that Model Explorer opens, in the format of its ``graph_builder`` classes: a list of
    one graph, in which every region is drawn wherever it is entered. Frames are namespaces."""
    drawing = Drawing(flow, repeat=True)
    arrows: dict[str, list[Arrow]] = defaultdict(list)
    for arrow in drawing.arrows:
        arrows[arrow.target].append(arrow)
    nodes = [_node(box, arrows[box.name]) for box in drawing.boxes]
    return [{"id": flow.graph.name, "nodes": nodes}]


def _node(box: Box, arrows: list[Arrow]) -> dict[str, Any]:
    node: dict[str, Any] = {
        "id": box.name,
        "label": box.text,
        # A slash of a name's own would open another level.
        "namespace": "/".join(name.replace("/", "∕") for name in box.frame),
        "incomingEdges": [
            {
                "sourceNodeId": arrow.source,
                "sourceNodeOutputId": str(arrow.output),
                "targetNodeInputId": str(arrow.input),
            }
            for arrow in arrows
        ],
        "outputsMetadata": [
            {
                "id": str(number),
                "attrs": _key_values({"__tensor_tag": name, "tensor_shape": type_text}),
            }
            for number, (name, type_text) in enumerate(box.outputs)
        ],
    }
    if box.flow is not None:
        node["style"] = {"backgroundColor": _COLOURS[box.flow]}
        facts = {"gradient": box.flow.value}
        if box.occurrence is not None:
            facts["operation"] = box.occurrence.node.op
            facts["parameters"] = parameters(box.occurrence.node).strip()
            if (origin := box.occurrence.origin) is not None:
                facts["source"] = str(origin)
                facts["code"] = origin.code
        node["attrs"] = _key_values({key: text for key, text in facts.items() if text})
    return node


def _key_values(facts: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in facts.items()]
