"""A plan, written into its graph: every segment that is recomputed becomes a `Recompute`.

What the plan saves inside a segment gets a name (`jax.ad_checkpoint.checkpoint_name`), and the
policy of the region saves these names and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    ranges = [(segment, nodes_of(model, segment)) for segment in plan if segment.recompute]
    count = 0
    for segment, nodes in ranges:
        members = [here[node] for node in nodes]
        names = []
        for i in sorted(segment.saved):
            node = here[model.nodes[i]]
            for value in node.outputs:
                if not value.users:
                    continue
                names.append(f"planned_{count}")
                count += 1
                # One is bound for each: a function that JAX has seen is not traced again.
                program = _naming(names[-1])
                (named,) = graph.insert(program, [value], after=node)
                graph.replace_uses(value, named)
                producer = getattr(named, "producer", None)
                if isinstance(producer, Node):
                    members.append(producer)
        policy = jax.checkpoint_policies.save_only_these_names(*names) if names else None
        graph.group(members, recompute=True, policy=policy, name="recomputed")
    return graph


def nodes_of(model: MemoryModel, segment: Segment) -> list[Node]:
    """The nodes of a segment, those among them that write no buffer."""
    assert model.graph is not None
    nodes = model.graph.nodes
    return nodes[_place(model, segment.start) : _place(model, segment.stop)]


def _place(model: MemoryModel, operation: int) -> int:
    assert model.graph is not None
    if operation == len(model):
        return len(model.graph.nodes)
    place = model.cuts[operation] if operation else 0
    assert place is not None
    return place


def _naming(name: str) -> Callable[[Any], Any]:
    return lambda value: checkpoint_name(value, name)  # type: ignore[no-untyped-call]
