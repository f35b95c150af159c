"""Builds `jax.checkpoint` regions in which XLA, too, keeps the chosen results and nothing else.

Each result to save gets a name (see `checkpoint_names`), and the policy of the region saves the
results with these names only. The operands of a region are always saved.

XLA fuses some operations into their readers. If the result of such an operation were an operand or
an output of a region, XLA would have to keep the result. So each region that reads the result has a
copy of the operation. An optimization barrier stands before and after a region, so that XLA does
not compute a value on both sides of the barrier.

A whole region is recomputed when the cotangents of its outputs arrive. Nodes that are needed only
when the cotangents of one inner operation arrive form an inner region with that operation.
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
from tracegrad.ir.node_groups import make_adjacent, values_entering
from tracegrad.ir.running import read, run_node
from tracegrad.planning.checkpoint_names import named_results


@dataclass(frozen=True, eq=False)
class Stretch:
    """Nodes of a graph that run one after the other, and the way that they run.

    Attributes:
      nodes: in the order of execution.
      instead: maps a node to the graph that runs in place of the node.
      recompute: whether the nodes form a region, which the backward pass recomputes.
      saved: the nodes whose results are saved; True if the node's derivative reads the results.
      late: maps a node A to a node B: A is recomputed when the cotangents of B arrive. Only B, or
        other nodes that wait for B, read the results of A.
    """

    nodes: Sequence[Node]
    instead: Mapping[Node, Graph] = field(default_factory=dict)
    recompute: bool = False
    saved: Mapping[Node, bool] = field(default_factory=dict)
    late: Mapping[Node, Node] = field(default_factory=dict)


def in_stretches(graph: Graph, stretches: Sequence[Stretch], copied: Collection[Node]) -> Graph:
    """Returns the graph, run as the stretches say. Each node of the graph is in one stretch.
    Regions copy the nodes in `copied`, instead of taking their results as operands."""
    steps = _plan_steps(graph, stretches, copied)

    def run(*args: Any) -> list[Any]:
        values: dict[Value, Any] = {**graph.constants}
        values.update(zip(graph.inputs, args, strict=True))
        for step in steps:
            _run_step(step, values)
        return read(graph.outputs, values)

    new = graph_of(jax.make_jaxpr(run)(*graph.in_avals))
    return replace(graph, program=new.program, make_nodes=new.make_nodes)


# ------------------------------------------------------------------------------- planning the steps


@dataclass(frozen=True, eq=False)
class _Step:
    node: Node
    instead: Graph | None = None
    names: Sequence[str] = ()  # names for the policy, if the results are saved
    reads_results: bool = False  # whether the derivative of the node reads its results

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
    """Steps that are recomputed together.

    `steps` are in the order of execution; copies of nodes outside of the region come first. Nodes
    outside of all regions read the outputs `read_outside`, which pass through a barrier.
    """

    steps: Sequence[_Step | _Region]
    operands: Sequence[Value]
    outputs: Sequence[Value]
    waits: bool = False  # whether a barrier delays the region until all operands are computed
    policy: Callable[..., Any] | None = None
    read_outside: Sequence[Value] = ()

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
    """The nodes and regions that read each value, updated while nodes are moved into regions."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._readers: dict[Value, set[Any]] = {v: set(users) for v, users in graph.users.items()}

    def of(self, value: Value) -> set[Any]:
        return self._readers.get(value, set())

    def remove(self, nodes: Sequence[Any], values: Sequence[Value]) -> None:
        """Forgets the nodes, which a region now contains."""
        for value in values:
            self._readers.get(value, set()).difference_update(nodes)

    def add(self, region: _Region) -> None:
        for value in region.operands:
            self._readers.setdefault(value, set()).add(region)


def _plan_steps(
    graph: Graph, stretches: Sequence[Stretch], copied: Collection[Node]
) -> list[_Step | _Region]:
    names = (f"planned_{k}" for k in itertools.count())
    readers, steps = _Readers(graph), list[_Step | _Region]()
    for stretch in reversed(stretches):  # so that the later readers of its results are known
        of_stretch = [_make_step(node, stretch, names) for node in stretch.nodes]
        if stretch.recompute:
            steps[:0] = _make_stretch_region(of_stretch, stretch, readers, copied)
        else:
            steps[:0] = of_stretch
    unread = _find_unread_originals(steps, readers, copied)
    return [step for step in steps if isinstance(step, _Region) or step.node not in unread]


def _make_step(node: Node, stretch: Stretch, names: Iterator[str]) -> _Step:
    is_saved = stretch.recompute and node in stretch.saved
    result_names = list(itertools.islice(names, len(node.outputs))) if is_saved else []
    return _Step(node, stretch.instead.get(node), result_names, is_saved and stretch.saved[node])


def _find_unread_originals(
    steps: Sequence[_Step | _Region], readers: _Readers, copied: Collection[Node]
) -> set[Node]:
    """Returns the copied nodes whose own results no operation reads: only their copies are read."""
    unread, results = set[Node](), readers.graph.results
    for step in reversed(steps):
        if isinstance(step, _Region) or step.node not in copied:
            continue
        if all(v not in results and readers.of(v) <= unread for v in step.outputs):
            unread.add(step.node)
    return unread


def _make_stretch_region(
    steps: Sequence[_Step],
    stretch: Stretch,
    readers: _Readers,
    copied: Collection[Node],
) -> list[_Step | _Region]:
    """Returns a stretch as a region. Before the region stand the nodes of which only the region's
    copies are read."""
    kept = [name for step in steps for name in step.names]
    inside: list[_Step | _Region] = list(steps)
    for reader in dict.fromkeys(stretch.late.values()):
        late = [node for node, other in stretch.late.items() if other is reader]
        waiting = _dependents_up_to(reader, late, readers.graph)
        if waiting.issubset(stretch.nodes):  # not so if a view of a result is outside
            inside = _group_into_region(inside, waiting, readers, copied)
    region, outside = _make_region(inside, readers, copied)
    outer = [v for v in region.outputs if any(not isinstance(r, _Region) for r in readers.of(v))]
    policies: Any = jax.checkpoint_policies
    policy = policies.save_only_these_names(*kept) if kept else None
    complete = replace(region, policy=policy, read_outside=outer)
    readers.remove([region], region.operands)
    readers.add(complete)
    return [*outside, complete]


def _group_into_region(
    steps: Sequence[_Step | _Region],
    nodes: Collection[Node],
    readers: _Readers,
    copied: Collection[Node],
) -> list[_Step | _Region]:
    """Returns the steps, some nodes of which form a region, at the position of its first step."""
    chosen = {node.key for node in nodes}
    members = [step for step in steps if step.key in chosen]
    ordered: list[Any] = make_adjacent(steps, chosen, "a group of recomputed operations")
    region, outside = _make_region(members, readers, copied)
    at = ordered.index(members[0])
    return [*ordered[:at], *outside, region, *ordered[at + len(members) :]]


def _make_region(
    steps: Sequence[_Step | _Region], readers: _Readers, copied: Collection[Node]
) -> tuple[_Region, list[_Step | _Region]]:
    """Returns the steps as a region, and the steps of which only copies are read, which stay
    outside."""
    unread = _find_unread_originals(steps, readers, copied)
    members = [s for s in steps if isinstance(s, _Region) or s.node not in unread]
    outside: list[_Step | _Region] = [s for s in steps if isinstance(s, _Step) and s.node in unread]
    producers = readers.graph.producers
    to_copy, pending = set[Node](), values_entering(members)
    while pending:
        producer = producers.get(pending.pop())
        if producer is not None and producer in copied and producer not in to_copy:
            to_copy.add(producer)
            pending += producer.operands
    copies = [_Step(node) for node in readers.graph.nodes if node in to_copy]
    inner_steps = [*copies, *members]
    operands = values_entering(inner_steps)
    inside = {s.node if isinstance(s, _Step) else s for s in members}
    computed = [value for step in members for value in step.outputs]
    outputs = [v for v in computed if v in readers.graph.results or not readers.of(v) <= inside]
    # Without a barrier, XLA may compute in advance the parts of all regions that depend on
    # arguments alone (an RNN's products with its inputs), and hold the results until the regions
    # run. Also, in a loop JAX saves a named result again for each inner region that takes the
    # result as an operand, unless another operation, such as the barrier, stands between them.
    waits = any(value in producers for value in operands)
    region = _Region(inner_steps, operands, outputs, waits)
    for step in members:
        readers.remove(list(inside), step.operands)
    readers.add(region)
    return region, outside


def _dependents_up_to(reader: Node, nodes: Sequence[Node], graph: Graph) -> set[Node]:
    """Returns `reader`, the nodes, and the nodes that depend on them before `reader`."""
    found, pending = {reader}, [*nodes]
    while pending:
        if (node := pending.pop()) not in found:
            found.add(node)
            pending += [user for value in node.outputs for user in graph.users.get(value, ())]
    return found


# ---------------------------------------------------------------------------------------- running


def _run_step(step: _Step | _Region, values: MutableMapping[Value, Any]) -> None:
    if isinstance(step, _Region):
        results = _run_region(step, [values[value] for value in step.operands])
        if step.read_outside:
            outputs = dict(zip(step.outputs, results, strict=True))
            waited = _make_barrier()(*(outputs[value] for value in step.read_outside))
            outputs.update(zip(step.read_outside, waited, strict=True))
            results = [outputs[value] for value in step.outputs]
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
            _run_step(step, values)
        return [values[value] for value in region.outputs]

    with _jax.standing_for(region.source.info):
        if region.waits:
            operands = _make_barrier()(*operands)
        return list(jax.checkpoint(recomputed, policy=region.policy)(*operands))


def _make_barrier() -> Callable[..., list[Any]]:
    barrier: Callable[..., Sequence[Any]] = jax.lax.optimization_barrier

    @jax.custom_jvp
    def together(*values: Any) -> list[Any]:
        return list(barrier(values))

    def derivative(values: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        # Cotangents get no barrier. If they waited for each other, XLA would pad the cotangent of
        # each slice of an argument to the size of the argument.
        return together(*values), list(tangents)

    together.defjvp(derivative, symbolic_zeros=True)
    return together
