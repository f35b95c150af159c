"""Runs programs of JAX with other arrays in the place of those that they close over.

JAX holds the arrays that a jitted function closes over as constants of its program, at any depth of
calls. As constants they would silently have no gradient: a tape makes them operands.
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
from tracegrad.ir.importer import import_program
from tracegrad.ir.nodes import Node, Value
from tracegrad.ir.running import run_graph
from tracegrad.ir.writing import Port, Where
from tracegrad.rewriting.host_calls import end_gradients_at_host

# By the identity of an array that a program closes over, what stands in its place.
Instead = Mapping[int, Any]
RULES = (_jax.CUSTOM_JVP, _jax.CUSTOM_VJP)


def run_program(program: Any, args: Sequence[Any], instead: Instead) -> list[Any]:
    """The results of a program, computed as a tape differentiates them.

    What is handed to the host is a constant to differentiation, and so is what a `jax.custom_jvp`
    closes over: to differentiate that is an error, where JAX takes zero in silence. An effect in a
    scan happens at each step.

    Args:
      program: of JAX.
      args: its operands.
      instead: what stands in the place of arrays that it closes over.
    """
    graph, steps = _staying_in_scans(end_gradients_at_host(import_program(program)))
    return run_graph(_closing_over(graph, instead), [*args, *steps])


def _closing_over(graph: Graph, instead: Instead) -> Graph:
    if not instead:
        return graph
    edited = _opened(graph, instead, Where())
    held = {port.value: port.closed_over for port in edited.ins}
    return edited.graph.replace(constants={**edited.graph.constants, **held})


def _opened(region: Graph, instead: Instead, where: Where) -> Edited:
    """A region with ports in the place of the constants that others stand for."""
    kept, ports = dict[Value, Any](), list[Port]()
    for value, array in region.constants.items():
        if id(array) in instead:
            ports.append(Port((), value, instead[id(array)]))
        else:
            kept[value] = array
    draft = Draft(region.replace(constants=kept) if ports else region, where)
    draft.ins += ports
    for node in region.nodes:
        if not isinstance(node, CustomGradient) and _holds(node, instead):
            inside = where.inside(node)
            edits = {name: _opened(inner, instead, inside) for name, inner in node.regions.items()}
            try:
                draft.replace([node], with_regions(node, edits, where))
            except GraphError as error:
                raise NotImplementedError(
                    f"a jitted function inside of {node.op} closes over an array that a tape "
                    "follows: pass the array to it as an argument"
                ) from error
    return draft.finished()


def _holds(node: Node, instead: Instead) -> bool:
    """Whether a program of a node closes over an array in the place of which others stand."""
    facts = _jax.facts_below(node.params)
    return any(id(array) in instead for array in (*facts.arrays, *facts.numpy_arrays))


def _staying_in_scans(graph: Graph) -> tuple[Graph, list[Any]]:
    """The graph in which effects in scans depend on the step, and the further operands for that.

    JAX takes out of a scan that it differentiates what is the same at each step, and takes along
    what prints or calls the host there. It takes nothing out that stands in a branch on a value of
    the step.
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
    return bool(node.effects) or _jax.calls_host(node.op)


# ------------------------------------------------------------------- what custom rules close over


def closes_over_watched(function: str) -> ValueError:
    """The error for an array that a custom derivative closes over, and a tape watches."""
    return ValueError(
        f"the custom derivative of {function} closes over an array that a tape watches: its rule "
        "cannot tell the derivative with respect to it. Pass the array as an argument"
    )


def refused_arrays(program: Any, captured: Sequence[Any]) -> dict[int, str]:
    """Those of the arrays that a program closes over to which a custom derivative in it is blind:
    by identity the name of the function that has the derivative."""
    if _jax.program_facts(program).primitives.isdisjoint(RULES):
        return {}
    ids = list(map(id, captured))
    edited = _opened(import_program(program), dict(zip(ids, captured)), Where())
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
