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
from tracegrad.tape.recorded_rules import parts_of_rule

_MOST_FORWARD_PASSES = 3  # nested: the forward pass of a rule may call its own rule without end


def has_host_results(program: Any) -> bool:
    """Whether a program calls the host for results, on which later operations may depend."""
    return any(
        node.effects and node.outputs and _jax.calls_host([node.op])
        for region in graph_of(program).regions_below
        for node in region.nodes
    )


def remove_repeated_effects(graph: Graph) -> Graph:
    """Removes the operations that have an effect and no result, such as prints.

    The forward passes of custom rules lose such operations too; the backward passes, which have not
    run yet, keep such operations. Raises NotImplementedError for an effect with results, such as a
    call of the host: differentiating the graph would run the effect again.
    """
    removed = list(_find_removable(graph, (), _MOST_FORWARD_PASSES))
    return around_each(graph, removed, lambda op, *operands: []).graph


def _find_removable(graph: Graph, path: Path, depth: int) -> Iterator[Occurrence]:
    """Yields the operations to remove. `depth`: the number of nested forward passes to enter."""
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
            if depth == 0 or _is_known_pure(node):
                continue
            regions.append(node.face_names[0])  # the forward pass
            inner -= 1
        for name in regions:
            if node.region(name).effects:
                yield from _find_removable(node.region(name), found.into(name), inner)


def _is_known_pure(node: CustomGradient) -> bool:
    """Whether a rule is known, without tracing its passes, to have no effects. (A trace would
    differentiate all operands, also closed-over operands, for which the rule raises.)"""
    parts = None if node.kind == "jvp" else parts_of_rule(node.params["bwd"])
    return parts is not None and not any(
        _jax.program_facts(program).has_effects for program in parts.programs
    )
