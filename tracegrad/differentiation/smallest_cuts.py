"""What cuts an input of a program off: the fewest cuts without which a gradient would arrive.

Every program that computes something has nodes that pass no gradient on: the maximum that softmax
subtracts is stopped, masks come of comparisons. Such a node is the cause only where nothing but it
stands in the way. So each way of the data from the input to an output is weighed by the nodes on it
that pass nothing on, and the lightest ones are told. Of equally light ones those come first whose
cuts the user has written.

The search runs backward from the outputs, through calls, branches and loops, and knows of every
value the lightest ways from there on; a region is searched once for each of its outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tracegrad import _jax
from tracegrad._jax.caches import once_for_each
from tracegrad.differentiation.connectivity import Walk, is_connectable
from tracegrad.ir import (
    CustomGradient,
    Graph,
    Node,
    Occurrence,
    Origin,
    StopGradient,
    Value,
    dtype_of,
    is_reference,
)
from tracegrad.ir.authors import whose
from tracegrad.ir.dependence import Masks, back_around, enter, mask_of, node_dependence, spread
from tracegrad.ir.occurrence import Path, at, users_line
from tracegrad.rewriting.forward_mode import place_of

# So many equally light ways are told apart, by the lines of their cuts.
MOST_WAYS = 8


@dataclass(frozen=True)
class Cut:
    """A node at which the gradient on its way to an input ends."""

    occurrence: Occurrence
    result: Value  # whose cotangent goes no further

    def __str__(self) -> str:
        node, origin = self.occurrence.node, self.occurrence.origin
        place = at(origin)
        if isinstance(node, StopGradient):
            return f"stop_gradient{place}"
        if isinstance(node, CustomGradient):
            face = "backward" if node.kind == "vjp" else "derivative"
            place = place_of(self.occurrence)
            return f"the custom gradient {node.name}{place}, whose {face} gives it nothing"
        if is_connectable(self.result):
            return f"{node.name}{place}, whose derivative is zero"
        dtype = getattr(self.result.aval, "dtype", None)
        if node.op == "convert_element_type":
            return f"the conversion to {dtype}{place}"
        return f"{node.name}{place}, whose result is {dtype}"


# The cuts on one way from an input to an output, in the order in which the data meet them.
CutsOnWay = tuple[Cut, ...]


def smallest_cuts(graph: Graph, targets: Sequence[int]) -> list[tuple[CutsOnWay, ...]]:
    """For every input of a graph, the fewest cuts without which it were connected to a target.

    Several entries are several ways, with as many cuts each, the likeliest cause first: the first
    `MOST_WAYS` of them. None if nothing that leads to a target uses the input; one without cuts if
    it is connected.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> program = tg.graph(lambda x: jnp.sum(x * jax.lax.stop_gradient(jnp.round(x))))(jnp.ones(3))
    >>> smallest_cuts(program, [0])
    [((),)]
    >>> program = tg.graph(lambda x: jax.lax.stop_gradient(jax.nn.softmax(x)))(jnp.ones(3))
    >>> [str(cut).split(" at ")[0] for (way,) in smallest_cuts(program, [0]) for cut in way]
    ['stop_gradient']
    """
    reached = [int(is_connectable(value)) for value in graph.inputs]
    ways = _Search().of(graph, reached, targets)
    return [
        tuple(
            tuple(Cut(Occurrence(cut.path, cut.node), cut.result) for cut in cuts)
            for cuts in ways[value].lightest
        )
        if value in ways and is_connectable(value)
        else ()
        for value in graph.inputs
    ]


def explain_unconnected(graph: Graph, source: int, ways: Sequence[CutsOnWay]) -> str:
    """Why an input gets no gradient, in words; `ways`: its `smallest_cuts`."""
    value = graph.inputs[source]
    if not is_connectable(value):
        return f"it is {dtype_of(value)}, which has no gradient"
    found = ["cut by " + ", and by ".join(map(str, cuts)) for cuts in ways]
    found = list(dict.fromkeys(found))
    if not found:
        return "nothing that leads to the output uses it"
    more = f", and in {len(found) - 3} more places" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


# ------------------------------------------------------------------------------------------- ways


@dataclass(frozen=True)
class _Cut:
    """A cut inside of a region, which may be entered from several places."""

    path: Path
    node: Node
    result: Value
    line: Origin | None  # of the user's, as far as it is told by the calls in `path`
    rank: int

    @property
    def place(self) -> object:
        """Equal for what a user would call one place."""
        return self.node.name, self.line or self.node

    def within(self, call: Node, name: str) -> _Cut:
        line = self.line or users_line(call)
        return replace(self, path=((call, name), *self.path), line=line)


@dataclass(frozen=True)
class _Ways:
    """The lightest ways from one value to another: how many cuts each has, and these cuts of each,
    the likeliest first."""

    count: int
    lightest: tuple[tuple[_Cut, ...], ...]

    def then(self, onward: _Ways) -> _Ways:
        """These ways, and from their end on those."""
        if not self.count:
            return onward
        if not onward.count:
            return self
        ways = (
            (*cuts, *(cut for cut in more if cut not in cuts))
            for cuts in self.lightest
            for more in onward.lightest
        )
        return _Ways(self.count + onward.count, _first(ways))

    def within(self, call: Node, name: str) -> _Ways:
        """What they are to the graph that the region of a call stands in."""
        if not self.count:
            return self
        ways = (tuple(cut.within(call, name) for cut in cuts) for cuts in self.lightest)
        return _Ways(self.count, _first(ways))


_FREE = _Ways(0, ((),))


def _lighter(one: _Ways | None, other: _Ways) -> _Ways:
    """The lightest among the ways of both."""
    if one is None or other.count < one.count:
        return other
    if one.count < other.count or not one.count or one == other:
        return one
    return _Ways(one.count, _first((*one.lightest, *other.lightest)))


def _first(
    ways: Iterator[tuple[_Cut, ...]] | Sequence[tuple[_Cut, ...]],
) -> tuple[tuple[_Cut, ...], ...]:
    """The likeliest of some ways, one of those with cuts at the same places."""
    ranked = sorted(ways, key=lambda cuts: sum(cut.rank for cut in cuts))
    known = {frozenset(cut.place for cut in cuts): cuts for cuts in reversed(ranked)}
    return tuple(reversed(known.values()))[:MOST_WAYS]


def _rank(node: Node, result: Value) -> int:
    """How unlikely a cut is to be a mistake: a library's is not; a mask is often meant as that."""
    is_mask = not is_connectable(result) and node.op != "convert_element_type"
    return 100 * (whose(Occurrence((), node)) != "yours") + is_mask


# ----------------------------------------------------------------------------------------- search


@dataclass
class _Search:
    walk: Walk = field(default_factory=Walk)

    @once_for_each
    def of(self, graph: Graph, reached: Masks, targets: Sequence[int]) -> dict[Value, _Ways]:
        """The ways from the values of a graph to the nearest of some outputs.

        `reached`: for each input, 1 if a gradient there would go on to a source.
        """
        masks: dict[Value, int] = {}
        spread(graph, reached, self.walk.rule, masks)
        outputs = (graph.outputs[k] for k in targets)
        ways = {value: _FREE for value in outputs if isinstance(value, Value)}
        for node in reversed(graph.nodes):
            ins = [mask_of(value, masks) for value in node.inputs]
            for i, found in self._into(node, ins, ways):
                operand = node.inputs[i]
                if isinstance(operand, Value):
                    ways[operand] = _lighter(ways.get(operand), found)
        return ways

    def _into(self, node: Node, ins: Masks, ways: dict[Value, _Ways]) -> list[tuple[int, _Ways]]:
        """The ways from the operands of a node, given those from its results."""
        references = [v for v in node.operands if is_reference(v)]
        if references:  # what is written there may be read anywhere
            onward = [ways[v] for v in (*node.outputs, *references) if v in ways]
            return [(i, found) for i in range(len(node.inputs)) for found in onward]
        return [
            (i, found.then(ways[value]))
            for k, value in enumerate(node.outputs)
            if value in ways
            for i, found in self._through(node, ins, k)
        ]

    def _through(self, node: Node, ins: Masks, k: int) -> Iterator[tuple[int, _Ways]]:
        """The ways from the operands of a node to one of its results."""
        entered = self.walk.enter(node, ins)
        if entered is not None:
            yield from self._through_regions(node, entered[1], k)
            return
        inside: dict[int, _Ways] = {}
        if node.op == "shard_map" and (masks := enter(node, ins, self.walk.region)) is not None:
            inside = dict(self._through_regions(node, masks[1], k))
        result = node.outputs[k]
        cut = _Ways(1, ((_Cut((), node, result, users_line(node), _rank(node, result)),),))
        for i, value in enumerate(node.inputs):
            if not self._flow(node)[k] >> i & 1 or not isinstance(value, Value):
                continue
            # Among integers nothing is cut: that was where they came from.
            if not is_connectable(value) or self._is_connected(node, ins, i, k):
                yield i, _FREE
            else:
                yield i, inside[i] if i in inside and inside[i].count else cut

    @once_for_each
    def _flow(self, node: Node) -> Masks:
        if isinstance(node, CustomGradient) and node.kind == "vjp":
            # Its rule may use what its function does not.
            return [(1 << len(node.inputs)) - 1] * len(node.outputs)
        return node_dependence(node)

    def _is_connected(self, node: Node, ins: Masks, i: int, k: int) -> bool:
        if isinstance(node, StopGradient) or not is_connectable(node.outputs[k]):
            return False
        if ins[i]:
            reached = tuple(mask != 0 for mask in ins)
        else:  # behind a cut: as if there was none
            reached = tuple(is_connectable(value) for value in node.inputs)
        return bool(self.walk.vjp_rows(node, reached)[k] >> i & 1)

    def _through_regions(
        self, node: Node, masks: dict[str, Masks], k: int
    ) -> Iterator[tuple[int, _Ways]]:
        if node.primitive is _jax.SCAN or node.primitive in _jax.WHILES:
            yield from self._through_loop(node, masks, k)
            return
        shift = 1 if node.primitive is _jax.COND else 0
        if shift:  # which branch is taken
            yield 0, _FREE
        for name, reached in masks.items():
            for i, found in self._inside(node, name, reached, k).items():
                yield i + shift, found

    def _through_loop(
        self, node: Node, masks: dict[str, Masks], k: int
    ) -> Iterator[tuple[int, _Ways]]:
        name = "jaxpr" if node.primitive is _jax.SCAN else "body_jaxpr"

        def back(onward: Sequence[_Ways | None]) -> list[_Ways | None]:
            ways: list[_Ways | None] = [None] * len(masks[name])
            for j, further in enumerate(onward):
                if further is not None:
                    for i, found in self._inside(node, name, masks[name], j).items():
                        ways[i] = _lighter(ways[i], found.then(further))
            return ways

        def join(one: _Ways | None, other: _Ways | None) -> _Ways | None:
            return one if other is None else _lighter(one, other)

        onward: list[_Ways | None] = [None] * len(node.outputs)
        if node.primitive is _jax.SCAN:
            shift, (first, carried) = 0, _jax.scan_split(node.params)
            onward[k] = _FREE
            ways = back(back_around(node, onward, back, join))
            length = node.params["length"]
            if k < carried and (length == 0 or not isinstance(length, int)):
                ways[first + k] = _FREE  # with no iteration at all, what went in comes out
        else:
            shift = int(node.params["cond_nconsts"])
            # Of which numbers it depends when the loop ends, on that depend all results.
            ends = self._inside(node, "cond_jaxpr", masks["cond_jaxpr"], 0)
            yield from ((i, found) for i, found in ends.items() if i < shift)
            onward = [ends.get(shift + j) for j in range(len(onward))]
            onward[k] = _FREE
            onward = back_around(node, onward, back, join)
            ways = [*back(onward)[: node.params["body_nconsts"]], *onward]
        yield from ((shift + i, found) for i, found in enumerate(ways) if found is not None)

    def _inside(self, node: Node, name: str, reached: Masks, k: int) -> dict[int, _Ways]:
        """The ways from the inputs of a region of a node to one of its outputs."""
        region = node.regions[name]
        ways = self.of(region, [int(mask != 0) for mask in reached], (k,))
        return {
            i: ways[value].within(node, name)
            for i, value in enumerate(region.inputs)
            if value in ways
        }
