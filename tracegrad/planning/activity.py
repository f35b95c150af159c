"""Finds the *active* values, which get a cotangent. An active value depends on an input that the
program is differentiated with respect to, and a differentiated output depends on the value."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

from tracegrad import _jax
from tracegrad.ir import Graph, Node, StopGradient, Value, has_gradient
from tracegrad.ir.dependence import Masks, back_around, enter, spread


def active_values(graph: Graph) -> set[Value]:
    """Returns the values on the paths from the differentiated inputs to the outputs. If the
    differentiated inputs are not known, all inputs and all traced constants count as
    differentiated."""
    known = graph.differentiated
    others = len(graph.inputs) - len(known)  # the taps that rules have added after the inputs
    chosen = [*known, *[True] * others]
    given = [int(c and has_gradient(v)) for c, v in zip(chosen, graph.inputs, strict=True)]
    constants = [v for v in traced_constants(graph) if has_gradient(v) and not known]
    return _live_values(
        graph, [True] * len(graph.outputs), _reached_values(graph, given, constants)
    )


def active_outputs(node: Node, active: Collection[Value]) -> list[int]:
    return [i for i, value in enumerate(node.outputs) if value in active]


def traced_constants(graph: Graph) -> list[Value]:
    """A gradient may flow into the other trace whose tracers these constants are."""
    return [value for value, array in graph.constants.items() if _jax.is_tracer(array)]


def active_in_body(scan: Node, body: Graph, active: Collection[Value]) -> set[Value]:
    """Returns the values of a scan's body that get a cotangent in some iteration.

    `body` is the body of the scan, or a graph that computes the same. `active` has the active
    values of the graph that contains the scan.
    """
    given = [int(isinstance(v, Value) and v in active) for v in scan.inputs]
    entered = enter(scan, given, _run)
    reached = _reached_values(body, given if entered is None else entered[1]["jaxpr"])

    def back(wanted: list[bool]) -> list[bool]:
        live = _live_values(body, wanted, reached)
        return [v in live for v in body.inputs]

    ends = [v in active for v in scan.outputs]
    return _live_values(body, back_around(scan, ends, back, operator.or_), reached)


def _reached_values(graph: Graph, inputs: Masks, constants: Sequence[Value] = ()) -> set[Value]:
    masks = dict.fromkeys(constants, 1)
    spread(graph, inputs, _rule, masks)
    return {value for value, mask in masks.items() if mask}


def _run(region: Graph, ins: Masks) -> Masks:
    return spread(region, ins, _rule)


def _rule(node: Node, ins: Masks) -> Masks:
    if isinstance(node, StopGradient) or not any(ins):
        return [0] * len(node.outputs)
    is_open = node.primitive in (_jax.SCAN, _jax.JIT)
    entered = enter(node, ins, _run) if is_open else None
    outs = [1] * len(node.outputs) if entered is None else entered[0]
    return [mask * has_gradient(v) for mask, v in zip(outs, node.outputs, strict=True)]


def _live_values(graph: Graph, wanted: Sequence[bool], reached: Collection[Value]) -> set[Value]:
    ends = [v for v, is_end in zip(graph.outputs, wanted, strict=True) if is_end]
    live = {v for v in ends if isinstance(v, Value) and v in reached}
    for node in reversed(graph.nodes):
        if any(v in live for v in node.outputs):
            live.update(v for v in node.operands if v in reached)
    return live
