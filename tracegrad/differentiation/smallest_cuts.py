"""Explains why an input gets no gradient: the fewest cuts on a path from the input to an output.

Most programs have nodes that pass no gradient on: softmax stops the gradient of the maximum that it
subtracts, and comparisons make masks. Such a node is the cause only if no path goes around it. A
*cut* is a node on a path of the data that passes no gradient on, and the weight of a path is the
number of its cuts. The lightest path from the input to an output is reported; of equally light
paths, the path whose cuts are in the user's code.

The search runs backward from the outputs, and keeps the lightest path from each value to an output.
A region is searched once for each of its outputs. If calls were inlined instead, a program whose
functions each call another function twice would grow exponentially.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from tracegrad import _jax
from tracegrad._jax.caches import once_for_each
from tracegrad.differentiation.connectivity import Walk, are_sources, is_connectable
from tracegrad.ir import (
    CustomGradient,
    Graph,
    Node,
    Occurrence,
    StopGradient,
    Value,
    dtype_of,
    is_reference,
)
from tracegrad.ir.authors import author_of
from tracegrad.ir.dependence import Masks, back_around, enter, mask_of, node_dependence, spread
from tracegrad.ir.inlined import RegionCall, is_loop, may_take_no_step, region_calls
from tracegrad.ir.occurrence import at
from tracegrad.rewriting.forward_mode import line_of_rule
from tracegrad.variables.capture import READ


@dataclass(frozen=True)
class Cut:
    """A node that passes no gradient on to an input."""

    occurrence: Occurrence
    result: Value  # the result of the node whose cotangent ends there

    @property
    def rank(self) -> int:
        """How unlikely the cut is to be a mistake: 100 in a library's code, and 1 more for a
        mask."""
        node = self.occurrence.node
        is_mask = not is_connectable(self.result) and node.op != "convert_element_type"
        return 100 * (author_of(Occurrence((), node)) != "yours") + is_mask

    def within(self, call: Node, name: str) -> Cut:
        """Returns the cut as seen from the graph that contains the call of the cut's region."""
        path, node = self.occurrence.path, self.occurrence.node
        return Cut(Occurrence(((call, name), *path), node), self.result)

    def __str__(self) -> str:
        node, origin = self.occurrence.node, self.occurrence.origin
        place = at(origin)
        if isinstance(node, StopGradient):
            return f"stop_gradient{place}"
        if isinstance(node, CustomGradient):
            face = "backward" if node.kind == "vjp" else "derivative"
            place = line_of_rule(self.occurrence)
            return f"the custom gradient {node.name}{place}, whose {face} gives it nothing"
        if node.primitive is READ:
            name, line = node.params["name"], node.params["assigned_at"]
            whose_value = f"the Variable {name!r}" if name else "a Variable"
            assigned = f" ({line.place})" if line else ""
            return (
                f"the assignment of {whose_value}{assigned}, which is not differentiated, before "
                f"its read{place}"
            )
        if is_connectable(self.result):
            return f"{node.name}{place}, whose derivative is zero"
        dtype = getattr(self.result.aval, "dtype", None)
        if node.op == "convert_element_type":
            return f"the conversion to {dtype}{place}"
        return f"{node.name}{place}, whose result is {dtype}"


# The cuts on a path from an input to an output, in the order of execution.
CutsOnWay = tuple[Cut, ...]


def smallest_cuts(
    graph: Graph, targets: Sequence[int], differentiated: Collection[int] | None = None
) -> list[CutsOnWay | None]:
    """Returns, for every input of a graph, the fewest cuts on a path to a target.

    The cuts are ``()`` if the input is connected, and None if no target depends on the input.
    `targets` has the positions of outputs; `differentiated` is as for `connections`.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> program = tg.graph(lambda x: jnp.sum(x * jax.lax.stop_gradient(jnp.round(x))), jnp.ones(3))
    >>> smallest_cuts(program, [0])
    [()]
    >>> program = tg.graph(lambda x: jax.lax.stop_gradient(jax.nn.softmax(x)), jnp.ones(3))
    >>> [str(cut).split(" at ")[0] for cuts in smallest_cuts(program, [0]) for cut in cuts]
    ['stop_gradient']
    """
    reached = list(map(int, are_sources(graph, differentiated)))
    ways = _Search().find_ways(graph, reached, targets)
    return [
        ways[value].cuts if value in ways and is_connectable(value) else None
        for value in graph.inputs
    ]


def explain_unconnected(graph: Graph, source: int, cuts: CutsOnWay | None) -> str:
    """Explains why an input gets no gradient; `cuts` are the input's `smallest_cuts`."""
    value = graph.inputs[source]
    if not is_connectable(value):
        return f"it is {dtype_of(value)}, which has no gradient"
    if cuts is None:
        return "nothing that leads to the output uses it"
    return "cut by " + ", and by ".join(map(str, cuts))


# ----------------------------------------------------------------------------------------- search


@dataclass(frozen=True)
class _Way:
    """The lightest path from one value to another, by its cuts."""

    cuts: CutsOnWay = ()
    weight: tuple[int, int] = (0, 0)  # how many cuts, and the sum of their ranks

    def then(self, onward: _Way) -> _Way:
        (count, rank), (more, further) = self.weight, onward.weight
        cuts = (*self.cuts, *(cut for cut in onward.cuts if cut not in self.cuts))
        return _Way(cuts, (count + more, rank + further))

    def within(self, call: Node, name: str) -> _Way:
        return _Way(tuple(cut.within(call, name) for cut in self.cuts), self.weight)


_FREE = _Way()


def _lighter_way(first: _Way | None, second: _Way | None) -> _Way | None:
    if first is None or (second is not None and second.weight < first.weight):
        return second
    return first


@dataclass
class _Search:
    walk: Walk = field(default_factory=Walk)

    @once_for_each
    def find_ways(self, graph: Graph, reached: Masks, targets: Sequence[int]) -> dict[Value, _Way]:
        """Returns the lightest path from each value of a graph to a target output. `reached` has,
        for each input, 1 if a gradient at the input would reach a source."""
        masks: dict[Value, int] = {}
        spread(graph, reached, self.walk.rule, masks)
        outputs = (graph.outputs[k] for k in targets)
        ways = {value: _FREE for value in outputs if isinstance(value, Value)}
        for node in reversed(graph.nodes):
            ins = [mask_of(value, masks) for value in node.inputs]
            for i, way in self._ways_into(node, ins, ways):
                operand = node.inputs[i]
                if isinstance(operand, Value):
                    lightest = _lighter_way(ways.get(operand), way)
                    assert lightest is not None
                    ways[operand] = lightest
        return ways

    def _ways_into(self, node: Node, ins: Masks, ways: dict[Value, _Way]) -> list[tuple[int, _Way]]:
        references = [v for v in node.operands if is_reference(v)]
        if references:  # a value that is written to a Ref may be read anywhere
            onward = [ways[v] for v in (*node.outputs, *references) if v in ways]
            return [(i, way) for i in range(len(node.inputs)) for way in onward]
        return [
            (i, way.then(ways[value]))
            for k, value in enumerate(node.outputs)
            if value in ways
            for i, way in self._ways_through(node, ins, k)
        ]

    def _ways_through(self, node: Node, ins: Masks, k: int) -> Iterator[tuple[int, _Way]]:
        entered = self.walk.enter(node, ins)
        if entered is not None:
            yield from self._through_regions(node, entered[1], k)
            return
        inside: dict[int, _Way] = {}
        if node.op == "shard_map" and (masks := enter(node, ins, self.walk.region)) is not None:
            inside = dict(self._through_regions(node, masks[1], k))
        cut = Cut(Occurrence((), node), node.outputs[k])
        through_cut = _Way((cut,), (1, cut.rank))
        for i, value in enumerate(node.inputs):
            if not self._node_flow(node)[k] >> i & 1 or not isinstance(value, Value):
                continue
            # An integer operand cuts nothing: the cut is the node that made integers of floats.
            if not is_connectable(value) or self._is_connected(node, ins, i, k):
                yield i, _FREE
            else:
                yield i, inside[i] if i in inside and inside[i].cuts else through_cut

    @once_for_each
    def _node_flow(self, node: Node) -> Masks:
        if isinstance(node, CustomGradient) and node.kind == "vjp":
            # The rule may use operands that the function does not use.
            return [(1 << len(node.inputs)) - 1] * len(node.outputs)
        return node_dependence(node)

    def _is_connected(self, node: Node, ins: Masks, i: int, k: int) -> bool:
        if isinstance(node, StopGradient) or not is_connectable(node.outputs[k]):
            return False
        if ins[i]:
            reached = tuple(mask != 0 for mask in ins)
        else:  # no gradient gets past an earlier cut: ask as if there were no cut
            reached = tuple(is_connectable(value) for value in node.inputs)
        return bool(self.walk.vjp_rows(node, reached)[k] >> i & 1)

    def _through_regions(
        self, node: Node, masks: dict[str, Masks], k: int
    ) -> Iterator[tuple[int, _Way]]:
        calls = region_calls(node)
        if is_loop(node):
            yield from self._through_loop(node, calls, masks, k)
            return
        if node.primitive is _jax.COND:  # the operand that selects the branch
            yield 0, _FREE
        for call in calls:
            for i, way in self._ways_inside(node, call, masks, k).items():
                yield call.operands[i], way

    def _through_loop(
        self, node: Node, calls: Sequence[RegionCall], masks: dict[str, Masks], k: int
    ) -> Iterator[tuple[int, _Way]]:
        *condition, body = calls

        def back(onward: Sequence[_Way | None]) -> list[_Way | None]:
            ways: list[_Way | None] = [None] * len(body.operands)
            for j, further in enumerate(onward):
                if further is not None:
                    for i, way in self._ways_inside(node, body, masks, j).items():
                        ways[i] = _lighter_way(ways[i], way.then(further))
            return ways

        onward: list[_Way | None] = [None] * len(body.results)
        for call in condition:  # all results depend on when the loop ends
            for i, way in self._ways_inside(node, call, masks, 0).items():
                j = call.fed_back_from[i]
                if j is None:
                    yield call.operands[i], way
                else:
                    onward[j] = way
        onward[k] = _FREE
        onward = back_around(node, onward, back, _lighter_way)
        for i, lightest in enumerate(back(onward)):
            j = body.fed_back_from[i]
            if j is not None and may_take_no_step(node):  # the initial value is the result
                lightest = onward[j]
            if lightest is not None:
                yield body.operands[i], lightest

    def _ways_inside(
        self, node: Node, call: RegionCall, masks: dict[str, Masks], k: int
    ) -> dict[int, _Way]:
        """Returns the paths from the inputs of a region to the region's output `k`."""
        region = node.regions[call.name]
        ways = self.find_ways(region, [int(mask != 0) for mask in masks[call.name]], (k,))
        return {
            i: ways[value].within(node, call.name)
            for i, value in enumerate(region.inputs)
            if value in ways
        }
