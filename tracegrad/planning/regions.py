"""A plan, written into its graph: every segment that is recomputed becomes a `Recompute`.

What the plan saves inside a segment gets a name (see `names`), and the policy of the region saves
these names and nothing else. What comes into it is kept anyway; to be kept on the host it gets a
name inside. Where the backward pass of a segment goes piece by piece, each piece is a `Recompute`
within that of the segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax

from tracegrad.differentiation.pull_back import active_inputs
from tracegrad.ir import Graph, Node, Value
from tracegrad.ir.grouping import entering
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.names import name_results, name_values
from tracegrad.planning.simulation import Segment


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
    for segment in reversed(plan):  # what comes before it stays where it is
        if segment.recompute:
            _recompute(graph, model, segment, names, inputs)
    return graph


def _recompute(
    graph: Graph,
    model: MemoryModel,
    segment: Segment,
    names: Iterator[str],
    inputs: Collection[Value],
) -> None:
    """Puts a segment into a region; `inputs`: those that may be kept on the host."""
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
        kept += (came := list(itertools.islice(names, len(alone))))
        name_values(graph, alone, came, before=inside[0])
        pieces = [graph.nodes[first : len(graph.nodes) - behind]]
    policy = _keeping(kept, segment.offload)
    whole: Sequence[Node] = pieces[0]
    if len(pieces) > 1:
        whole = [_recomputed(graph, nodes, policy) for nodes in reversed(pieces) if nodes]
    _in_turn(graph, _recomputed(graph, whole, policy))


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


def _in_turn(graph: Graph, region: Node) -> None:
    """Lets nothing of a region run before all that comes into it is there.

    XLA may run what depends on arguments alone (an RNN's products with its inputs) for all regions
    ahead, and holds it until their turn comes.
    """
    values = list(dict.fromkeys(v for v in region.inputs if isinstance(v, Value)))
    if all(v.producer is None for v in values):
        return
    together = dict(zip(values, graph.insert(_barrier(), values, before=region), strict=True))
    graph.set_inputs(region, [together[v] if isinstance(v, Value) else v for v in region.inputs])


def _barrier() -> Callable[..., list[Any]]:
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


def _recomputed(graph: Graph, members: Sequence[Node], policy: Callable[..., Any] | None) -> Node:
    """Puts nodes of a graph into a `Recompute`."""
    return graph.group(members, recompute=True, policy=policy, name="recomputed")


def nodes_of(model: MemoryModel, start: int, stop: int) -> Sequence[Node]:
    """The nodes from one operation up to another, those among them that write no buffer."""
    assert model.graph is not None
    return model.graph.nodes[_place(model, start) : _place(model, stop)]


def _place(model: MemoryModel, operation: int) -> int:
    assert model.graph is not None
    if operation == len(model):
        return len(model.graph.nodes)
    return model.cuts[operation] if operation else 0
