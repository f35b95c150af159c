"""A plan, written into its graph: every segment that is recomputed becomes a `Recompute`.

What the plan saves inside a segment gets a name (`jax.ad_checkpoint.checkpoint_name`), and the
policy of the region saves these names and nothing else. Where the backward pass of a segment goes
piece by piece, each piece is a `Recompute` within that of the segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from tracegrad.ir import Graph, Node
from tracegrad.rewriting.planning.model import MemoryModel
from tracegrad.rewriting.planning.simulation import Segment


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
        named = _name_saved(graph, [here[model.nodes[i]] for i in sorted(segment.saved)], names)
        regions = []
        for nodes in pieces:
            members = [new for node in nodes for new in (here[node], *named.get(here[node], {}))]
            if len(pieces) == 1:
                regions += members
            elif members:
                regions.append(_recomputed(graph, members, named))
        _recomputed(graph, regions, named)
    return graph


# Of a node whose results are saved: the nodes that give them names, with these.
_Named = Mapping[Node, Mapping[Node, str]]


def _name_saved(graph: Graph, nodes: Sequence[Node], names: Iterator[str]) -> _Named:
    named: dict[Node, dict[Node, str]] = {}
    for node in nodes:
        for value in node.outputs:
            if not value.users:
                continue
            name = next(names)
            # A function for each: one that JAX has seen is not traced again.
            (result,) = graph.insert(_naming(name), [value], after=node)
            graph.replace_uses(value, result)
            producer = getattr(result, "producer", None)
            if isinstance(producer, Node):
                named.setdefault(node, {})[producer] = name
    return named


def _recomputed(graph: Graph, members: Sequence[Node], named: _Named) -> Node:
    """Puts nodes of a graph into a `Recompute`, which saves what has a name."""
    names = [name for found in named.values() for name in found.values()]
    policy = jax.checkpoint_policies.save_only_these_names(*names) if names else None
    return graph.group(members, recompute=True, policy=policy, name="recomputed")


def nodes_of(model: MemoryModel, start: int, stop: int) -> list[Node]:
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


def _naming(name: str) -> Callable[[Any], Any]:
    return lambda value: checkpoint_name(value, name)  # type: ignore[no-untyped-call]
