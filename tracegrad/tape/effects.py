"""Keeps effects to one time: when an operation runs, not again when its gradient is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Occurrence
from tracegrad.ir.editing import around_each
from tracegrad.ir.importer import graph_of
from tracegrad.ir.occurrence import Path
from tracegrad.rewriting.host_calls import would_run_again
from tracegrad.tape.recorded_rules import parts_of_rule


def reads_the_host(program: Any) -> bool:
    """Whether a call of the host has results, on which later operations may depend."""
    return any(
        node.effects and node.outputs and _jax.calls_host([node.op])
        for region in graph_of(program).regions_below
        for node in region.nodes
    )


def silence(graph: Graph) -> Graph:
    """Removes the operations that have an effect and no result, such as prints.

    The forward passes of custom rules lose such operations too; the backward passes, which have not
    run yet, keep such operations. Raises NotImplementedError for a call of the host with results:
    differentiating the graph would call the host again.
    """
    return around_each(graph, list(_find_silent(graph, (), 3)), lambda op, *operands: []).graph


def _find_silent(graph: Graph, path: Path, depth: int) -> Iterator[Occurrence]:
    """Yields the operations to remove. `depth`: how many nested forward passes of rules to enter,
    since a forward pass may call its own rule without end."""
    for node in graph.nodes:
        if not node.effects or (node.has_references and not node.regions):
            continue  # a write to a Ref stays: later reads depend on it
        found, regions = Occurrence(path, node), list(node.regions)
        if not regions:
            if node.outputs:
                raise would_run_again(node)
            yield found
        inner = depth
        if isinstance(node, CustomGradient):
            if depth == 0 or _has_no_effects(node):
                continue
            regions.append(node.face_names[0])
            inner -= 1
        for name in regions:
            if node.region(name).effects:
                yield from _find_silent(node.region(name), found.into(name), inner)


def _has_no_effects(node: CustomGradient) -> bool:
    """Whether a rule has no effects, as far as known without tracing its passes. (A trace takes
    derivatives in all operands, and the rule refuses operands that its function closes over.)"""
    parts = None if node.kind == "jvp" else parts_of_rule(node.params["bwd"])
    return parts is not None and not any(
        _jax.program_facts(program).has_effects for program in parts.programs
    )
