"""A plan, written into its graph: every segment that is recomputed becomes a `Recompute`.

What the plan saves inside a segment gets a name (see `names`), and the policy of the region saves
these names and nothing else. What comes into it is kept anyway; to be kept on the host it gets a
name inside. Where the backward pass of a segment goes piece by piece, each piece is a `Recompute`
within that of the segment.

So that nothing is kept but what the plan counts, what XLA computes inside of what reads it goes
over no border: a region has copies of it. And there is a barrier in front of each region and behind
it, over which XLA does not compute again in one place what was written in another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax

from tracegrad.differentiation.pull_back import active_inputs
from tracegrad.ir import Graph, Node, Value
from tracegrad.ir.costs import nbytes
from tracegrad.ir.grouping import entering, leaving
from tracegrad.planning.fusion import without_compiling
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.modelling import operands
from tracegrad.planning.simulation import Segment
from tracegrad.planning.tuning import TUNING
from tracegrad.rewriting.checkpoint_names import name_results, name_values

_BARRIER = "together"  # see `_barrier`


def with_regions(
    model: MemoryModel, plan: Sequence[Segment], offloaded: Collection[int] = ()
) -> Graph:
    """The graph of a model, rewritten; the model's own stays as it is.

    `offloaded`: the positions of its inputs that may be kept on the host as well.
    """
    assert model.graph is not None
    graph = model.graph.copy()
    inputs = [graph.inputs[i] for i in offloaded]
    names = (f"planned_{k}" for k in itertools.count())
    copied = {graph.node_here(node) for node in _copied(model)}
    for segment in reversed(plan):  # what comes before it stays where it is
        if segment.recompute:
            _recompute(graph, model, segment, names, inputs, copied)
    for node in reversed(graph.nodes):
        if node in copied and not leaving(graph, [node]):
            graph.erase(node)
    return graph


def _copied(model: MemoryModel) -> Iterator[Node]:
    """The nodes that XLA computes inside of what reads them and of which regions have copies: those
    not much smaller than all that has to be there for it, so that a sum of many, such as a residual
    stream, goes over the border itself; and as large as each that they take, since the cotangent of
    a part is as large as the whole, for each region that reads it."""
    assert model.graph is not None
    fusion = model.fusion or without_compiling(model.graph)
    there: dict[Value, frozenset[Value]] = {}
    for node, fate in zip(model.graph.nodes, fusion, strict=True):
        taken = operands(node)
        made = [v for v in taken if v.producer is not None]
        read = frozenset[Value]().union(*(there.get(v, {v}) for v in made))
        size = min((nbytes(v.aval) for v in node.outputs), default=0)
        is_whole = all(nbytes(v.aval) <= size for v in taken)
        is_small = sum(nbytes(v.aval) for v in read) <= TUNING.terms * size
        if fate.inlined and is_whole and is_small:
            there.update(dict.fromkeys(node.outputs, read))
            yield node


def _recompute(
    graph: Graph,
    model: MemoryModel,
    segment: Segment,
    names: Iterator[str],
    inputs: Collection[Value],
    copied: Collection[Node],
) -> None:
    """Puts a segment into a region; `inputs`: those that may be kept on the host; `copied`: what
    the region has copies of."""
    kept: list[str] = []
    pieces = []
    for start, stop in reversed(segment.pieces):
        first, behind = _place(model, start), len(graph.nodes) - _place(model, stop)
        for node in (model.nodes[i] for i in range(start, stop) if i in segment.saved):
            reads_results = _reads_results(model, node)
            kept += name_results(graph, graph.node_here(node), names, reads_results)
        pieces.append(graph.nodes[first : len(graph.nodes) - behind])
    if segment.offload:
        (inside,) = pieces
        alone = _read_alone(graph, inside, inputs)
        kept += (given := list(itertools.islice(names, len(alone))))
        name_values(graph, alone, given, before=inside[0])
        pieces = [graph.nodes[first : len(graph.nodes) - behind]]
        copied = ()  # what comes in has its name here
    policy = _keeping(kept, segment.offload)
    whole: Sequence[Node] = pieces[0]
    if len(pieces) > 1:
        whole = [_recomputed(graph, nodes, policy, copied) for nodes in pieces][::-1]
    region = _recomputed(graph, whole, policy, copied)
    # XLA may run what depends on arguments alone (an RNN's products with its inputs) for all
    # regions ahead, and holds it until their turn comes.
    came = entering([region])
    if any(v.producer is not None for v in came):
        _wait(graph, came, {"before": region}, where=lambda user: user is region, outputs=False)
    # JAX rounds what is saved, and XLA has the original beside it as long as that is read. Regions
    # behind have a barrier of their own.
    if left := [v for v in region.outputs if any(user.name != _BARRIER for user in v.users)]:
        _wait(graph, left, {"after": region})


def _wait(graph: Graph, values: Sequence[Value], place: dict[str, Node], **users: Any) -> None:
    """Lets users of some values, as of `Graph.replace_uses`, wait until all of these are there."""
    waited = graph.insert(_barrier(), values, **place)
    for value, together in zip(values, waited, strict=True):
        graph.replace_uses(value, together, **users)


def _read_alone(graph: Graph, nodes: Sequence[Node], inputs: Collection[Value]) -> list[Value]:
    """What comes into some nodes and nothing else reads, but arguments, which are alive anyway;
    except these `inputs`."""
    inside = {*nodes}
    return [
        value
        for value in entering(nodes)
        if (value.producer is not None or value in inputs)
        and value not in graph.outputs
        and inside.issuperset(value.users)
    ]


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


def _reads_results(model: MemoryModel, node: Node) -> bool:
    positions = active_inputs(node, model.active)
    return bool(positions and model.residuals.of(node, positions).results)


def _keeping(names: Sequence[str], on_host: bool) -> Callable[..., Any] | None:
    """The policy of a region that keeps nothing but what has these names."""
    policies: Any = jax.checkpoint_policies
    if not names:
        return None
    keep: Callable[..., Any] = policies.save_only_these_names(*names)
    if on_host:
        keep = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(names),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return keep


def _recomputed(
    graph: Graph,
    nodes: Sequence[Node],
    policy: Callable[..., Any] | None,
    copied: Collection[Node],
) -> Node:
    """Puts nodes of a graph into a `Recompute`, but those of which only copies are read."""
    read, pending = set[Node](), entering(nodes)
    while pending:
        producer = pending.pop().producer
        if producer is not None and producer in copied and producer not in read:
            read.add(producer)
            pending += operands(producer)
    unread = set[Node]()
    for node in reversed(nodes):
        is_read = any(v in graph.outputs or not unread.issuperset(v.users) for v in node.outputs)
        if node in copied and not is_read:
            unread.add(node)
    members = [node for node in nodes if node not in unread]
    copies = [node for node in graph.nodes if node in read]
    return graph.group(members, recompute=True, policy=policy, name="recomputed", copies=copies)


def nodes_of(model: MemoryModel, start: int, stop: int) -> Sequence[Node]:
    """The nodes from one operation up to another, those among them that write no buffer."""
    assert model.graph is not None
    return model.graph.nodes[_place(model, start) : _place(model, stop)]


def _place(model: MemoryModel, operation: int) -> int:
    """Where the nodes begin that stand behind the operation before: there XLA has written it."""
    assert model.graph is not None
    nodes = model.graph.nodes
    if operation in (0, len(model)):
        return len(nodes) if operation else 0
    return nodes.index(model.nodes[operation - 1]) + 1
