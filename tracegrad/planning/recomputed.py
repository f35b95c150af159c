"""Regions that keep nothing but what is chosen, as XLA holds them.

What is to be kept gets a name (see `checkpoint_names`), and the policy of the region saves these
names and nothing else. What comes into it is kept anyway.

So that nothing else is kept, what XLA computes inside of what reads it goes over no border: the
region has copies of it. And there is a barrier in front of the region and behind it, over which XLA
does not compute again in one place what was written in another.

All of a region is run again when its cotangents arrive. What may wait for those of one operation
inside is in a region with that, in there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph, Node, Value
from tracegrad.ir.importer import graph_of
from tracegrad.ir.running import read, run_node
from tracegrad.ir.stretches import entering, gathered
from tracegrad.planning.checkpoint_names import named_results


@dataclass(frozen=True, eq=False)
class Stretch:
    """A stretch of a graph's nodes, and how it is to be run.

    Attributes:
      nodes: in the order of execution.
      instead: what is run in the place of some of the nodes.
      recompute: whether it is a region that is run again in the backward pass.
      saved: those of its nodes whose results are kept, and whether their derivatives read them.
      late: nodes that are run again when the cotangents of another arrive, and that other, which
        alone reads them, or what else waits for it.
    """

    nodes: Sequence[Node]
    instead: Mapping[Node, Graph] = field(default_factory=dict)
    recompute: bool = False
    saved: Mapping[Node, bool] = field(default_factory=dict)
    late: Mapping[Node, Node] = field(default_factory=dict)


def in_stretches(graph: Graph, stretches: Sequence[Stretch], copied: Collection[Node]) -> Graph:
    """A graph that runs its nodes as the stretches say, which together are all of them.

    `copied`: nodes of which regions have copies instead of taking their results.
    """
    steps = _planned(graph, stretches, copied)

    def run(*args: Any) -> list[Any]:
        values: dict[Value, Any] = {**graph.constants}
        values.update(zip(graph.inputs, args, strict=True))
        for step in steps:
            _run(step, values)
        return read(graph.outputs, values)

    new = graph_of(jax.make_jaxpr(run)(*graph.in_avals))
    return replace(graph, program=new.program, nodes=new.nodes)


# ------------------------------------------------------------------------------------ what is where


@dataclass(frozen=True, eq=False)
class _Step:
    """A node, and how it is run."""

    node: Node
    instead: Graph | None = None
    names: Sequence[str] = ()  # of its results, if they are kept
    reads_results: bool = False  # whether its derivative does

    @property
    def key(self) -> Any:
        return self.node.key

    @property
    def effects(self) -> Collection[Any]:
        return self.node.effects  # type: ignore[no-any-return]

    @property
    def operands(self) -> Sequence[Value]:
        return self.node.operands

    @property
    def outputs(self) -> Sequence[Value]:
        return self.node.outputs  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class _Region:
    """Steps that are run again together.

    `steps` come in order, copies before the others.
    `left`: what is read past the region by others than regions, behind a barrier.
    """

    steps: Sequence[_Step | _Region]
    operands: Sequence[Value]
    outputs: Sequence[Value]
    waits: bool = False  # for all that comes in, before anything of it is run
    policy: Callable[..., Any] | None = None
    left: Sequence[Value] = ()

    @property
    def key(self) -> Any:
        return self

    @property
    def effects(self) -> Collection[Any]:
        return ()

    @property
    def source(self) -> Any:
        first = self.steps[0]
        return first.node.source if isinstance(first, _Step) else first.source


class _Readers:
    """Who reads a value, of what stands in the graph by now: steps, regions, or the results."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._found: dict[Value, set[Any]] = {v: set(users) for v, users in graph.users.items()}

    def of(self, value: Value) -> set[Any]:
        return self._found.get(value, set())

    def gone(self, nodes: Sequence[Any], values: Sequence[Value]) -> None:
        """Nodes have become part of a region."""
        for value in values:
            self._found.get(value, set()).difference_update(nodes)

    def reads(self, region: _Region) -> None:
        for value in region.operands:
            self._found.setdefault(value, set()).add(region)


def _planned(
    graph: Graph, stretches: Sequence[Stretch], copied: Collection[Node]
) -> list[_Step | _Region]:
    names = (f"planned_{k}" for k in itertools.count())
    readers, steps = _Readers(graph), list[_Step | _Region]()
    for stretch in reversed(stretches):  # what is read behind it is known then
        own = [_step(node, stretch, names) for node in stretch.nodes]
        if stretch.recompute:
            steps[:0] = _in_region(own, stretch, readers, copied)
        else:
            steps[:0] = own
    unread = set[Node]()  # copies alone of these are read
    for step in reversed(steps):
        if isinstance(step, _Step) and step.node in copied and _is_unread(step, unread, readers):
            unread.add(step.node)
    return [step for step in steps if isinstance(step, _Region) or step.node not in unread]


def _step(node: Node, stretch: Stretch, names: Iterator[str]) -> _Step:
    is_saved = stretch.recompute and node in stretch.saved
    own = list(itertools.islice(names, len(node.outputs))) if is_saved else []
    return _Step(node, stretch.instead.get(node), own, is_saved and stretch.saved[node])


def _is_unread(step: _Step, unread: Collection[Node], readers: _Readers) -> bool:
    return all(
        value not in readers.graph.results and readers.of(value) <= set(unread)
        for value in step.outputs
    )


def _in_region(
    steps: Sequence[_Step],
    stretch: Stretch,
    readers: _Readers,
    copied: Collection[Node],
) -> list[_Step | _Region]:
    """The steps of a stretch as a region, and before it those of which only copies are read."""
    kept = [name for step in steps for name in step.names]
    inside: list[_Step | _Region] = list(steps)
    for reader in dict.fromkeys(stretch.late.values()):
        late = [node for node, other in stretch.late.items() if other is reader]
        waiting = _between(reader, late, readers.graph)
        if waiting.issubset(stretch.nodes):  # or there is a view of it outside
            inside = _grouped(inside, waiting, readers, copied)
    region, outside = _region(inside, readers, copied)
    left = [v for v in region.outputs if any(not isinstance(r, _Region) for r in readers.of(v))]
    policies: Any = jax.checkpoint_policies
    policy = policies.save_only_these_names(*kept) if kept else None
    whole = replace(region, policy=policy, left=left)
    readers.gone([region], region.operands)
    readers.reads(whole)
    return [*outside, whole]


def _grouped(
    steps: Sequence[_Step | _Region],
    nodes: Collection[Node],
    readers: _Readers,
    copied: Collection[Node],
) -> list[_Step | _Region]:
    """The steps with some nodes of theirs as a region, where these stand."""
    chosen = {node.key for node in nodes}
    members = [step for step in steps if step.key in chosen]
    ordered: list[Any] = gathered(steps, chosen, "what waits")
    region, outside = _region(members, readers, copied)
    at = ordered.index(members[0])
    return [*ordered[:at], *outside, region, *ordered[at + len(members) :]]


def _region(
    steps: Sequence[_Step | _Region], readers: _Readers, copied: Collection[Node]
) -> tuple[_Region, list[_Step | _Region]]:
    """Steps as a region, with a barrier in front; and those of which only copies are read."""
    unread = set[Node]()
    for step in reversed(steps):
        if isinstance(step, _Step) and step.node in copied and _is_unread(step, unread, readers):
            unread.add(step.node)
    members = [s for s in steps if isinstance(s, _Region) or s.node not in unread]
    outside: list[_Step | _Region] = [s for s in steps if isinstance(s, _Step) and s.node in unread]
    producers = readers.graph.producers
    wanted, pending = set[Node](), entering(members)
    while pending:
        producer = producers.get(pending.pop())
        if producer is not None and producer in copied and producer not in wanted:
            wanted.add(producer)
            pending += producer.operands
    copies = [_Step(node) for node in readers.graph.nodes if node in wanted]
    whole = [*copies, *members]
    came = entering(whole)
    inside = {s.node if isinstance(s, _Step) else s for s in members}
    made = [value for step in members for value in step.outputs]
    results = [v for v in made if v in readers.graph.results or not readers.of(v) <= inside]
    # XLA may run what depends on arguments alone (an RNN's products with its inputs) for all
    # regions ahead, and holds it until their turn comes. And in a loop JAX keeps what has a name
    # once more for each region inside of this one that takes it, if nothing else is in between.
    region = _Region(whole, came, results, waits=any(value in producers for value in came))
    for step in members:
        readers.gone(list(inside), step.operands)
    readers.reads(region)
    return region, outside


def _between(reader: Node, nodes: Sequence[Node], graph: Graph) -> set[Node]:
    """Some nodes, all that reads them, and so on up to a reader."""
    found, pending = {reader}, [*nodes]
    while pending:
        if (node := pending.pop()) not in found:
            found.add(node)
            pending += [user for value in node.outputs for user in graph.users.get(value, ())]
    return found


# ---------------------------------------------------------------------------------------- running


def _run(step: _Step | _Region, values: MutableMapping[Value, Any]) -> None:
    if isinstance(step, _Region):
        results = _run_region(step, [values[value] for value in step.operands])
        if step.left:
            behind = dict(zip(step.outputs, results, strict=True))
            waited = _barrier()(*(behind[value] for value in step.left))
            behind.update(zip(step.left, waited, strict=True))
            results = [behind[value] for value in step.outputs]
    else:
        operands = read(step.node.inputs, values)
        if step.instead is not None:
            results = step.instead(*operands)
        elif step.names:
            results = named_results(step.node, operands, step.names, step.reads_results)
        else:
            results = run_node(step.node, operands)
    values.update(zip(step.outputs, results, strict=True))


def _run_region(region: _Region, operands: Sequence[Any]) -> list[Any]:
    def recomputed(*operands: Any) -> list[Any]:
        values = dict(zip(region.operands, operands, strict=True))
        for step in region.steps:
            _run(step, values)
        return [values[value] for value in region.outputs]

    with _jax.standing_for(region.source.info):
        if region.waits:
            operands = _barrier()(*operands)
        return list(jax.checkpoint(recomputed, policy=region.policy)(*operands))


def _barrier() -> Callable[..., list[Any]]:
    """What gives nothing of what it is given before all of it is there."""
    barrier: Callable[..., Sequence[Any]] = jax.lax.optimization_barrier

    @jax.custom_jvp
    def together(*values: Any) -> list[Any]:
        return list(barrier(values))

    def derivative(values: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        # Cotangents do not wait for each other: those of an argument's slices would be padded.
        return together(*values), list(tangents)

    together.defjvp(derivative, symbolic_zeros=True)
    return together
