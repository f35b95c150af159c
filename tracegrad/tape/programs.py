"""Runs JAX programs with operands instead of the arrays that the programs close over.

The arrays that a jitted function closes over are constants of its program, at any depth of calls.
Constants would silently have no gradient, so a tape makes these arrays operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, GraphError, Occurrence
from tracegrad.ir.borders import Edited, with_regions
from tracegrad.ir.dependence import spread_below
from tracegrad.ir.draft import Draft
from tracegrad.ir.editing import Op, around_each
from tracegrad.ir.importer import graph_of
from tracegrad.ir.nodes import Node, Value
from tracegrad.ir.running import run_graph
from tracegrad.ir.writing import Port, Surroundings
from tracegrad.rewriting.host_calls import end_gradients_at_host

# Maps the id of an array that a program closes over to the array that replaces it.
Replacements = Mapping[int, Any]
RULES = (_jax.CUSTOM_JVP, _jax.CUSTOM_VJP)


def run_program(program: Any, args: Sequence[Any], instead: Replacements) -> list[Any]:
    """Runs a program in the form that a tape differentiates.

    Values passed to the host are constants for differentiation. It is an error to differentiate a
    value that a `jax.custom_jvp` closes over, for which JAX silently returns zero. An effect in a
    scan happens at each step.

    Args:
      program: a JAX program.
      args: the operands of the program.
      instead: the replacements of arrays that the program closes over.
    """
    graph, steps = _keep_effects_in_scans(end_gradients_at_host(graph_of(program)))
    return run_graph(_replace_constants(graph, instead), [*args, *steps])


def has_host_results(program: Any) -> bool:
    """Whether a program calls the host for results, on which later operations may depend."""
    return any(
        node.effects and node.outputs and _jax.calls_host([node.op])
        for region in graph_of(program).regions_below
        for node in region.nodes
    )


def _replace_constants(graph: Graph, instead: Replacements) -> Graph:
    """Also in inner regions."""
    if not instead:
        return graph
    edited = _open_constants(graph, instead, Surroundings())
    held = {port.value: port.closed_over for port in edited.ins}
    return edited.graph.replace(constants={**edited.graph.constants, **held})


def _open_constants(region: Graph, instead: Replacements, surroundings: Surroundings) -> Edited:
    """Makes the constants that `instead` replaces inputs of the region, by ports."""
    kept, ports = dict[Value, Any](), list[Port]()
    for value, array in region.constants.items():
        if id(array) in instead:
            ports.append(Port((), value, instead[id(array)]))
        else:
            kept[value] = array
    draft = Draft(region.replace(constants=kept) if ports else region, surroundings)
    draft.ins += ports
    for node in region.nodes:
        if not isinstance(node, CustomGradient) and _closes_over_replaced(node, instead):
            inside = surroundings.inside(node)
            edits = {
                name: _open_constants(inner, instead, inside)
                for name, inner in node.regions.items()
            }
            try:
                draft.replace([node], with_regions(node, edits, surroundings))
            except GraphError as error:
                raise NotImplementedError(
                    f"a jitted function inside of {node.op} closes over an array that a tape "
                    "follows: pass the array to it as an argument"
                ) from error
    return draft.finished()


def _closes_over_replaced(node: Node, instead: Replacements) -> bool:
    """`instead` has an array that a program of the node closes over."""
    facts = _jax.facts_below(node.params)
    return any(id(array) in instead for array in (*facts.arrays, *facts.numpy_arrays))


def _keep_effects_in_scans(graph: Graph) -> tuple[Graph, list[Any]]:
    """Makes effects in scans depend on the step. Returns the graph and the new operands.

    When JAX differentiates a scan, it moves operations that are the same at each step out of the
    scan, even prints and host calls. JAX does not move a branch on a value of the step, so each
    effect goes into a branch.
    """
    if not graph.effects:
        return graph, []
    found = graph.find(_is_effect_in_a_scan)
    edited = around_each(graph, found, _in_a_branch, taps=lambda _: [_jax.struct((), bool)])
    return edited.graph, [np.zeros(port.value.aval.shape, bool) for port in edited.ins]


def _in_a_branch(op: Op, *operands: Any) -> Any:
    return jax.lax.cond(op.taps[0], op.results, lambda *args: op.results(*args), *operands)


def _is_effect_in_a_scan(found: Occurrence) -> bool:
    node, around = found.node, [node.primitive for node, _ in found.path]
    if _jax.SCAN not in around or found.rule_around or any(p in _jax.WHILES for p in around):
        return False
    if node.has_references or (node.regions and node.primitive not in (*RULES, *_jax.WHILES)):
        return False
    return bool(node.effects) or _jax.calls_host([node.op])


# ------------------------------------------------------- arrays that custom rules close over


def closes_over_watched(function: str) -> ValueError:
    return ValueError(
        f"the custom derivative of {function} closes over an array that a tape watches: its rule "
        "returns no derivative with respect to the array. Pass the array as an argument"
    )


def refused_arrays(program: Any, captured: Sequence[Any]) -> dict[int, str]:
    """Finds the `captured` arrays that have no gradient, since a custom derivative in the program
    closes over them. Maps their ids to the name of the function with the derivative."""
    if _jax.program_facts(program).primitives.isdisjoint(RULES):
        return {}
    ids = list(map(id, captured))
    edited = _open_constants(graph_of(program), dict(zip(ids, captured)), Surroundings())
    inputs = [*(port.value for port in edited.ins), *edited.graph.inputs]
    graph = edited.graph.replace(inputs=inputs)
    at = [ids.index(id(port.closed_over)) for port in edited.ins]
    masks = spread_below(graph, [*(1 << i for i in at), *[0] * (len(inputs) - len(at))])
    refused: dict[int, str] = {}
    for region in graph.regions_below:
        for node in region.nodes:
            if isinstance(node, CustomGradient):
                facts = _jax.facts_below(node.params)
                own = set(map(id, (*facts.arrays, *facts.numpy_arrays)))
                flowing = 0
                for atom in node.inputs[: node.closed_over]:
                    flowing |= masks.get(atom, 0) if isinstance(atom, Value) else 0
                found = [i for k, i in enumerate(ids) if i in own or flowing >> k & 1]
                refused.update(dict.fromkeys(found, node.name))
    return refused
