"""Finds cuts that end one path of a source's gradient while the gradient arrives by another one.

Most cuts are meant. Behind a straight-through `x + stop_gradient(q - x)`, a target that the same
network computes or a stopped maximum, the stopped value soon joins a value that depends on the same
sources: the first join *covers* these sources. (Only sums cover a rounded value, which may be
clipped: ``round(w / s) * s`` is a mistake, though `s` depends on `w`, also if no sum follows.) If a
stopped value, or a term of it, has another use (the advantage of a critic), its gradient comes from
there. A stopped factor of a value with a gradient is a weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tracegrad.differentiation.connectivity import Walk
from tracegrad.insight.explaining.cut_off import CUT_CURES
from tracegrad.insight.explaining.visits import is_called
from tracegrad.insight.explanation import Finding
from tracegrad.ir import Graph, Node, Occurrence, StopGradient, Value, has_gradient, operations
from tracegrad.ir.authors import author_of
from tracegrad.ir.dependence import Masks, joined, leading_to, spread
from tracegrad.ir.occurrence import Path

_ROUNDINGS = operations.ROUNDINGS - {"sign", "nextafter"}
_SUMS = operations.ADDITIVE.keys() | operations.LINEAR | operations.VIEWS
_PRODUCTS = frozenset({"mul", "div"})
_JOINS = _SUMS | _PRODUCTS | operations.CONTRACTIONS
_JOINS |= {"convert_element_type", "clamp", "max", "min"}


def partial_cuts(
    program: Graph, targets: Collection[int], names: Mapping[int, str]
) -> Iterator[Finding]:
    """Returns a note for each line that cuts one of several paths of a source's gradient.

    Args:
      targets: the outputs with a cotangent.
      names: the paths of connected sources, by their inputs.
    """
    if not any(map(_is_cut, program.walk())):  # the search takes longer
        return
    found = _Cuts(program, targets)
    found.along(program, [1 << i if i in names else 0 for i in range(len(program.inputs))], ())
    lines: dict[Any, list[int]] = defaultdict(list)
    for k, place in enumerate(found.places):
        lines[place.origin].append(k)
    for of_line in lines.values():
        place = found.places[of_line[0]]
        bare = joined(found.bare[k] for k in of_line) & ~joined(found.covered[k] for k in of_line)
        if sources := tuple(path for i, path in names.items() if bare >> i & 1):
            cause = "stop_gradient" if isinstance(place.node, StopGradient) else "rounding"
            words = f"one path of the gradient ends at {place.node.name}; it arrives by others only"
            cure = CUT_CURES[cause].format(op=place.node.op)
            yield Finding.of(place, cause, words, sources, problem=False, cure=cure)


@dataclass
class _Cuts:
    """The cuts in a program. In a mask, the bits of the inputs say what gets a gradient through a
    value, and the bits after these, from which cuts it is computed."""

    program: Graph
    targets: Collection[int]
    walk: Walk = field(default_factory=Walk)
    places: list[Occurrence] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    is_alone: list[bool] = field(default_factory=list)
    # For each cut: the sources that a value at the first join depends on, and the other sources.
    covered: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    bare: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    scaled: set[int] = field(default_factory=set)  # multiplied by a value of its sources

    def along(self, graph: Graph, inputs: Masks, path: Path) -> Masks:
        """Goes through a graph; returns the masks of its outputs."""
        count, live = len(self.program.inputs), None
        if not path:
            live = leading_to(graph, [k in self.targets for k in range(len(graph.outputs))])
        every = (1 << count) - 1

        def rule(node: Node, ins: Masks) -> Masks:
            nothing = [0] * len(node.outputs)
            if not any(ins) or (live is not None and live.isdisjoint(node.outputs)):
                return nothing
            if is_called(node):
                ((name, region),) = node.regions.items()
                return self.along(region, ins, (*path, (node, name)))
            flowing = [mask & every for mask in ins]
            if node.regions and (entered := self.walk.enter(node, flowing)) is not None:
                for name, masks in entered[1].items():
                    self.along(node.regions[name], masks, (*path, (node, name)))
                return entered[0]
            if any(flowing) and _is_cut(here := Occurrence(path, node)):
                self.places.append(here)
                self.sources.append(joined(flowing))
                self.is_alone.append(_is_alone(graph, node.inputs[0], is_input=not path))
                return [1 << count + len(self.places) - 1]
            on = joined(self._onward(node, k, flowing, mask >> count) for k, mask in enumerate(ins))
            outs = zip(node.outputs, self.walk.rule(node, flowing), strict=True)
            return [out | on << count if has_gradient(v) else out for v, out in outs]

        return spread(graph, inputs, rule)

    def _onward(self, node: Node, k: int, flowing: Masks, cuts: int) -> int:
        """Returns the cuts before an operand that have not joined another value yet."""
        others = joined(mask for i, mask in enumerate(flowing) if i != k)
        on = 0
        while cuts:
            cut = cuts.bit_length() - 1
            cuts -= 1 << cut
            is_rounding = not isinstance(self.places[cut].node, StopGradient)
            if is_rounding and node.op not in _JOINS:
                if self.is_alone[cut] and cut in self.scaled:
                    self.bare[cut] |= self.sources[cut]
                continue
            if not others or (is_rounding and node.op in _PRODUCTS):
                if self.sources[cut] & others:
                    self.scaled.add(cut)
                on |= 1 << cut
                continue
            self.covered[cut] |= self.sources[cut] & others
            is_weight = not is_rounding and node.op in operations.FACTORS
            if self.is_alone[cut] and not is_weight:
                self.bare[cut] |= self.sources[cut] & ~others
        return on


def _is_cut(found: Occurrence) -> bool:
    """Whether a node is a cut in the user's code that may be a mistake."""
    is_cut = isinstance(found.node, StopGradient) or found.node.op in _ROUNDINGS
    return is_cut and author_of(found) == "yours"


def _is_alone(graph: Graph, value: Any, *, is_input: bool) -> bool:
    """Whether a value, and each term of it, has one use. `is_input`: whether the inputs of the
    graph are those of the program."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, Value) and has_gradient(value):
            maker = graph.producers.get(value)
            if len(graph.users[value]) > 1 or (maker is None and is_input):
                return False
            if maker is not None and maker.op in _SUMS:
                pending += maker.inputs
    return True
