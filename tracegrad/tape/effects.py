"""Removes effects that a gradient would repeat: an effect occurs once, when its operation runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Occurrence
from tracegrad.ir.editing import around_each
from tracegrad.ir.importer import graph_of
from tracegrad.ir.occurrence import Path
from tracegrad.rewriting.host_calls import would_run_again


def has_host_results(program: Any) -> bool:
    """Whether a program calls the host for results, on which later operations may depend."""
    return any(
        node.effects and node.outputs and _jax.calls_host([node.op])
        for region in graph_of(program).regions_below
        for node in region.nodes
    )


def remove_repeated_effects(graph: Graph) -> Graph:
    """Removes the operations that have an effect and no result, such as prints.

    Functions with a custom rule keep such operations, since their rule runs instead. Raises
    NotImplementedError for an effect with results, such as a call of the host: differentiating the
    graph would run the effect again.
    """
    removed = [
        found
        for found in _find_repeated(graph, ())
        if not any(isinstance(node, CustomGradient) for node, _ in found.path)
    ]
    return around_each(graph, removed, lambda op, *operands: []).graph


def _find_repeated(graph: Graph, path: Path) -> Iterator[Occurrence]:
    for node in graph.nodes:
        if not node.effects or (node.has_references and not node.regions):
            continue  # a write to a Ref stays: later reads depend on it
        found = Occurrence(path, node)
        if not node.regions:
            if node.outputs:
                raise would_run_again(node)
            yield found
        for name, region in node.regions.items():
            yield from _find_repeated(region, found.into(name))
