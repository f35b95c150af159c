"""Walks over a graph: its regions, each once, or its nodes, once for each path of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tracegrad.ir.errors import GraphError
from tracegrad.ir.occurrence import Occurrence, Path

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph

# The largest number of nodes to walk over, each counted with every path of calls to it. Such a walk
# takes minutes.
_MOST = 20_000_000


def regions_below(graph: Graph) -> list[Graph]:
    """Each once, at any depth."""
    seen: dict[Graph, None] = {}
    waiting = [graph]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen[each] = None
            regions = [r for node in each.nodes for r in node.regions.values()]
            waiting += reversed(regions)
    return list(seen)


def walk(graph: Graph) -> Iterator[Occurrence]:
    """See `Graph.walk`."""
    total = count(graph, {})
    if total > _MOST:
        raise GraphError(
            f"{graph.name} has {total:.1e} nodes, each counted with every path of calls to it: "
            "functions that are called several times call others several times, and so on. "
            "Look at one of its regions by itself: node.regions, or graph.regions_below"
        )
    return _walk(graph, ())


def count(graph: Graph, known: dict[Graph, int]) -> int:
    """`known` caches the number of nodes in each region."""
    if graph not in known:
        below = (region for node in graph.nodes for region in node.regions.values())
        known[graph] = len(graph.nodes) + sum(count(region, known) for region in below)
    return known[graph]


def _walk(graph: Graph, path: Path) -> Iterator[Occurrence]:
    for node in graph.nodes:
        found = Occurrence(path, node)
        yield found
        for name, region in node.regions.items():
            yield from _walk(region, found.into(name))


def shared_regions(graph: Graph) -> frozenset[Graph]:
    entered = Counter(
        region
        for each in regions_below(graph)
        for node in each.nodes
        for region in node.regions.values()
    )
    return frozenset(region for region, times in entered.items() if times > 1)
