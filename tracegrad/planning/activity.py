"""Finds the *active* values, which get a cotangent: an active value depends on a differentiated
input, and a differentiated output depends on the active value."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

from tracegrad import _jax
from tracegrad.ir import Graph, Node, StopGradient, Value, has_gradient
from tracegrad.ir.dependence import Masks, back_around, enter, spread


def active_values(graph: Graph) -> set[Value]:
    """Returns the values on the paths from the differentiated inputs to the outputs. If
    `graph.differentiated` is empty, nobody knows which inputs are differentiated: then all inputs
    and all traced constants count as differentiated."""
    known = graph.differentiated
    # Inputs after the known ones are taps of rules, which are differentiated.
    differentiated = [*known, *[True] * (len(graph.inputs) - len(known))]
    starts = [int(d and has_gradient(v)) for d, v in zip(differentiated, graph.inputs, strict=True)]
    constants = [v for v in traced_constants(graph) if has_gradient(v) and not known]
    return _live_values(
        graph, [True] * len(graph.outputs), _reached_values(graph, starts, constants)
    )


def active_outputs(node: Node, active: Collection[Value]) -> list[int]:
    return [i for i, value in enumerate(node.outputs) if value in active]


def traced_constants(graph: Graph) -> list[Value]:
    """Returns the constants that are tracers of an enclosing trace: it may need their gradients."""
    return [value for value, array in graph.constants.items() if _jax.is_tracer(array)]


def active_in_body(scan: Node, body: Graph, active: Collection[Value]) -> set[Value]:
    """Returns the values of a scan's body that get a cotangent in some iteration.

    `body` is the body of the scan, or a graph that computes the same. `active` has the active
    values of the graph that contains the scan.
    """
    starts = [int(isinstance(v, Value) and v in active) for v in scan.inputs]
    entered = enter(scan, starts, _reach_through_region)
    reached = _reached_values(body, starts if entered is None else entered[1]["jaxpr"])

    def back(is_wanted: list[bool]) -> list[bool]:
        live = _live_values(body, is_wanted, reached)
        return [v in live for v in body.inputs]

    is_active = [v in active for v in scan.outputs]
    return _live_values(body, back_around(scan, is_active, back, operator.or_), reached)


def _reached_values(graph: Graph, inputs: Masks, constants: Sequence[Value] = ()) -> set[Value]:
    masks = dict.fromkeys(constants, 1)
    spread(graph, inputs, _reach_through_node, masks)
    return {value for value, mask in masks.items() if mask}


def _reach_through_region(region: Graph, ins: Masks) -> Masks:
    return spread(region, ins, _reach_through_node)


def _reach_through_node(node: Node, ins: Masks) -> Masks:
    if isinstance(node, StopGradient) or not any(ins):
        return [0] * len(node.outputs)
    enters = node.primitive in (_jax.SCAN, _jax.JIT)
    entered = enter(node, ins, _reach_through_region) if enters else None
    outs = [1] * len(node.outputs) if entered is None else entered[0]
    return [mask * has_gradient(v) for mask, v in zip(outs, node.outputs, strict=True)]


def _live_values(graph: Graph, is_wanted: Sequence[bool], reached: Collection[Value]) -> set[Value]:
    ends = [v for v, is_end in zip(graph.outputs, is_wanted, strict=True) if is_end]
    live = {v for v in ends if isinstance(v, Value) and v in reached}
    for node in reversed(graph.nodes):
        if any(v in live for v in node.outputs):
            live.update(v for v in node.operands if v in reached)
    return live
