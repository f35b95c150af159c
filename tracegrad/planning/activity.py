"""Which values get a cotangent: those that are computed from what is differentiated and that lead
to a result which is."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Node, StopGradient, Value


def active_values(graph: Graph, inputs: Iterable[Value], outputs: Iterable[Value]) -> set[Value]:
    """The values of a graph between some of its inputs and some of its outputs; empty if no way
    leads from the one to the other."""
    reached = _reached(graph, inputs)
    return _live(graph, {v for v in outputs if v in reached}, reached) & reached


def active_operands(node: Node, active: Collection[Value]) -> list[int]:
    """The positions of the operands of a node that get a cotangent from it."""
    # What a custom rule closes over comes first, and gets nothing from the rule.
    first = node.params.get("num_consts", 0) if isinstance(node, CustomGradient) else 0
    operands = enumerate(node.inputs)
    return [i for i, v in operands if i >= first and isinstance(v, Value) and v in active]


def active_in_body(scan: Node, body: Graph, active: Collection[Value]) -> set[Value]:
    """The values of a scan's body that get a cotangent in some iteration.

    Args:
      scan: the node.
      body: its body, or a graph that computes the same.
      active: what gets a cotangent around the node.
    """
    inside = _reached_in_body(scan, body, active)
    ends = {
        inner
        for inner, outer in zip(body.outputs, scan.outputs, strict=True)
        if isinstance(inner, Value) and outer in active and inner in inside
    }
    live: set[Value] = set()
    while not ends <= live:
        live |= _live(body, ends, inside)
        ends |= inside & {after for before, after in _carries(scan, body) if before in live}
    return inside & live


def _reached(graph: Graph, inputs: Iterable[Value]) -> set[Value]:
    """The inputs that can have a gradient, and what is computed from them."""
    reached = {v for v in inputs if v.has_gradient}
    for node in graph.nodes:
        operands = [isinstance(v, Value) and v in reached for v in node.inputs]
        if isinstance(node, StopGradient) or not any(operands):
            continue
        outputs = list(node.outputs)
        if node.primitive in (_jax.SCAN, _jax.JIT):
            region = node.regions["jaxpr"]
            if node.primitive is _jax.SCAN:
                inside = _reached_in_body(node, region, reached)
            else:
                inside = _reached(region, _chosen(region.inputs, operands))
            outputs = _chosen(outputs, [v in inside for v in map(_value, region.outputs)])
        reached.update(v for v in outputs if v.has_gradient)
    return reached


def _reached_in_body(scan: Node, body: Graph, reached: Collection[Value]) -> set[Value]:
    inputs = set(_chosen(body.inputs, [_value(v) in reached for v in scan.inputs]))
    inside: set[Value] = set()
    while True:
        inside = _reached(body, inputs)
        more = {before for before, after in _carries(scan, body) if after in inside} - inputs
        if not more:
            return inside
        inputs |= more


def _carries(scan: Node, body: Graph) -> list[tuple[Value, Value | None]]:
    """What an iteration reads of the one before it, and what that wrote there."""
    constants, carried = _jax.scan_split(scan.params)
    befores = body.inputs[constants : constants + carried]
    return list(zip(befores, map(_value, body.outputs[:carried]), strict=True))


def _live(graph: Graph, outputs: Iterable[Value], reached: Collection[Value]) -> set[Value]:
    """The outputs, and what of `reached` leads to them."""
    live = set(outputs)
    for node in reversed(graph.nodes):
        if any(v in live for v in node.outputs):
            live.update(v for v in node.inputs if isinstance(v, Value) and v in reached)
    return live


def _value(operand: object) -> Value | None:
    return operand if isinstance(operand, Value) else None


def _chosen(values: Iterable[Value], which: Iterable[bool]) -> list[Value]:
    return [value for value, is_chosen in zip(values, which, strict=True) if is_chosen]
