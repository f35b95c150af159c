"""A plan, written into its graph: every segment that is recomputed becomes a `Recompute`.

What the plan saves inside a segment gets a name (see `names`), and the policy of the region saves
these names and nothing else. Where the backward pass of a segment goes
piece by piece, each piece is a `Recompute` within that of the segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad.ir import Graph, Node, Value
from tracegrad.planning.activity import active_operands
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.names import name_results
from tracegrad.planning.simulation import Segment


def with_regions(model: MemoryModel, plan: Sequence[Segment]) -> Graph:
    """The graph of a model, rewritten; the model's own stays as it is."""
    assert model.graph is not None
    original = model.graph
    graph = original.copy()
    here = dict(zip(original.nodes, list(graph.nodes), strict=True))
    names = (f"planned_{k}" for k in itertools.count())
    ranges = [
        (segment, [nodes_of(model, *piece) for piece in segment.pieces])
        for segment in plan
        if segment.recompute
    ]
    for segment, pieces in ranges:
        saved = [model.nodes[i] for i in sorted(segment.saved)]
        named = {
            node: name_results(graph, here[node], names, _reads_results(model, node))
            for node in saved
        }
        policy = _save_alone([name for found in named.values() for name in found.names])
        regions = []
        for nodes in pieces:
            members = [
                new
                for node in nodes
                for new in (named[node].nodes if node in named else [here[node]])
            ]
            if len(pieces) == 1:
                regions += members
            elif members:
                regions.append(_recomputed(graph, members, policy))
        _in_turn(graph, _recomputed(graph, regions, policy))
    return graph


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
    positions = active_operands(node, model.active)
    return bool(positions and model.residuals.of(node, positions).results)


def _save_alone(names: Sequence[str]) -> Callable[..., Any] | None:
    return jax.checkpoint_policies.save_only_these_names(*names) if names else None


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
    place = model.cuts[operation] if operation else 0
    assert place is not None
    return place
