"""A graph as boxes and arrows, which other programs draw: regions and scopes are boxes in a frame.

A call with regions is a frame with two boxes of its own: one that its operands go into, and from
which the regions take their inputs, and one that their results go into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tracegrad import _jax
from tracegrad.insight.gradient_flow import Flow, RegionFlow
from tracegrad.insight.parts import parts_of
from tracegrad.ir import Literal, Node, Occurrence, Value
from tracegrad.ir.occurrence import Path
from tracegrad.ir.text import label

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


@dataclass
class Drawing:
    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)


def draw(flow: RegionFlow, *, repeat: bool) -> Drawing:
    """The drawing of a graph.

    Args:
      flow: the flow of gradients through it.
      repeat: whether a region that is entered from several places is drawn in each of them.
    """
    return _Pen(repeat).graph(flow)


_Ends = dict[Value, tuple[str, int]]  # a value -> the box that it comes from, and which output


@dataclass
class _Pen:
    repeat: bool
    drawing: Drawing = field(default_factory=Drawing)
    frames: Counter[Frame] = field(default_factory=Counter)
    drawn: set[RegionFlow] = field(default_factory=set)

    def graph(self, flow: RegionFlow) -> Drawing:
        graph = flow.graph
        ends: _Ends = {}
        for value in graph.inputs:
            ends[value] = self.box(value.name, (), [value]), 0
        self.region(flow, (), (), ends)
        self.arrows(self.box("return", ()), graph.outputs, ends)
        return self.drawing

    def box(
        self,
        text: str,
        frame: Frame,
        outputs: list[Value] | tuple[Value, ...] = (),
        flow: Flow | None = None,
        occurrence: Occurrence | None = None,
    ) -> str:
        name = f"n{len(self.drawing.boxes)}"
        types = tuple((value.name, _jax.type_text(value.aval)) for value in outputs)
        self.drawing.boxes.append(Box(name, text, frame, types, flow, occurrence))
        return name

    def arrows(self, target: str, values: Sequence[Value | Literal], ends: _Ends) -> None:
        for i, value in enumerate(values):
            if isinstance(value, Value):
                self.drawing.arrows.append(Arrow(*ends[value], target, i))

    def region(self, flow: RegionFlow, path: Path, frame: Frame, ends: _Ends) -> None:
        """Draws the constants and nodes of a graph; `ends` has its inputs, and gets the rest."""
        for value in flow.graph.constants:
            ends[value] = self.box(value.name, frame, [value]), 0
        parts, _ = parts_of(flow.graph)
        for node, part in zip(flow.graph.nodes, parts, strict=True):
            inside = (*frame, *part)
            regions = flow.regions.get(node, {})
            last = self.node(node, flow, path, inside, regions, ends)
            ends.update((value, (last, k)) for k, value in enumerate(node.outputs))

    def node(
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
        known = bool(regions) and self.drawn.issuperset(regions.values())
        if not regions or (known and not self.repeat):
            text += " (as above)" if known else ""
            name = self.box(text, frame, node.outputs, kind, occurrence)
            self.arrows(name, list(node.inputs), ends)
            return name
        around = self.fresh((*frame, node.name))
        inputs = [value for inner in regions.values() for value in inner.graph.inputs]
        entry = self.box(text, around, inputs, kind, occurrence)
        self.arrows(entry, list(node.inputs), ends)
        leave = self.box(f"{node.name}: results", around, node.outputs, kind)
        first = 0
        for name, inner in regions.items():
            self.drawn.add(inner)
            within: _Ends = {v: (entry, first + i) for i, v in enumerate(inner.graph.inputs)}
            first += len(inner.graph.inputs)
            place = self.fresh((*around, name)) if len(regions) > 1 else around
            self.region(inner, (*path, (node, name)), place, within)
            self.arrows(leave, inner.graph.outputs, within)
        return leave

    def fresh(self, frame: Frame) -> Frame:
        """A frame of its own for a call, where others of its name may stand beside it."""
        self.frames[frame] += 1
        count = self.frames[frame]
        return frame if count == 1 else (*frame[:-1], f"{frame[-1]} ({count})")
