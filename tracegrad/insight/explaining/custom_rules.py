"""Compares the gradients of custom rules with the derivatives of their functions.

It also measures the operations inside of a rule, since a NaN may begin there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import numpy as np

from tracegrad import _jax
from tracegrad.insight.explaining import by_rule
from tracegrad.insight.explaining.observed import Observed
from tracegrad.insight.explaining.statistics import norms_of_rule
from tracegrad.insight.explaining.visits import Visit, is_in_scan, or_zeros
from tracegrad.insight.explanation import Finding, number_text
from tracegrad.insight.raising import can_trace_faces
from tracegrad.ir import CustomGradient, Graph, Node, Occurrence, Value, has_gradient
from tracegrad.ir.authors import code_of_rule
from tracegrad.ir.frames import OF_HOST_CALL
from tracegrad.ir.occurrence import Path
from tracegrad.tracing.rule_errors import CLOSES_OVER, dtype_advice

if TYPE_CHECKING:
    from tracegrad.insight.explaining.measuring import MeasuredPass


def changed_rules(observed: Observed) -> Iterator[Finding]:
    """Returns a finding for each rule of the user's that is not the derivative of its function."""
    for found, i, stat in observed.of("rule"):
        norms = np.asarray(stat, np.float64).reshape(-1, 4)
        norms = norms[~np.isnan(norms).any(axis=1)]
        given, own, apart, incoming = map(float, np.sqrt(np.sum(norms**2, axis=0)))
        # Terms that cancel leave rounding errors in proportion to the cotangent that came in.
        limit = 1e-3 * max(given, own) + 1e-5 * incoming
        if not all(map(math.isfinite, (given, own, apart))) or apart <= limit:
            continue
        yield Finding.of(
            found,
            "changed by a rule",
            f"the rule of {found.node.name} gives input {i} a gradient of norm "
            f"{number_text(given)}; the derivative of the function has {number_text(own)}, the "
            f"difference {number_text(apart)}",
            problem=False,
            cure="check it by `check_grads`, or declare it deliberate there",
            **by_rule.cure_custom_gradient(found),
        )


# ------------------------------------------------------------------------------- what is measured


def refuse_closed_over(
    refused: dict[Occurrence, str], graph: Graph, reached: AbstractSet[Value], path: Path
) -> None:
    """Notes the rules of a graph that close over differentiated values. The pass asks no rule for
    the cotangent of such a value, and so would not notice that JAX refuses the rule."""
    for node in graph.nodes:
        if not isinstance(node, CustomGradient) or node.kind != "vjp":
            continue
        if not reached.isdisjoint(node.inputs[: node.closed_over]):
            refused[Occurrence(path, node)] = f"{node.name} {CLOSES_OVER}"


def leaking_rules(graph: Graph) -> dict[Occurrence, str]:
    """Returns the refusal of each rule that has an array of an ended trace (`nondiff_argnums`)."""

    def leaks(node: Node) -> bool:
        if not isinstance(node, CustomGradient):
            return False
        arrays = (x for name in node.face_names for x in node.face(name).constants.values())
        return not can_trace_faces(node) or any(map(_jax.is_tracer, arrays))

    return {each: f"{each.node.name} {CLOSES_OVER}" for each in graph.walk() if leaks(each.node)}


def of_right_dtypes(measured: MeasuredPass, visit: Visit, results: Sequence[Any]) -> list[Any]:
    """Returns a rule's cotangents; inside a scan, where JAX requires the dtype of the input, casts
    cotangents of another dtype and notes that JAX refuses the rule."""
    node, found = visit.here.node, list(results)
    if is_in_scan(visit.here.path):
        for k, (i, ct) in enumerate(zip(visit.active, results, strict=True)):
            expected = node.inputs[i].aval.dtype
            if ct is not None and ct.dtype != expected:
                words = dtype_advice(node.name, expected, ct.dtype)
                measured.refused[visit.here] = words
                found[k] = ct.astype(expected)
    return found


def compare_with_primal(measured: MeasuredPass, visit: Visit, results: Sequence[Any]) -> None:
    """Measures how a rule's cotangents differ from the derivative of its function."""
    assert isinstance(visit.here.node, CustomGradient)
    primal, operands = visit.here.node.primal, visit.operands
    # JAX's derivative of a `while` loop does not exist, or is that of a search for a root. The
    # derivative of a host call is unknown, and effects would happen once more.
    is_host_call = code_of_rule(visit.here.node) in OF_HOST_CALL
    if is_host_call or visit.here.node.effects or _jax.WHILE.name in primal.operations:
        return
    wanted = [k for k, ct in enumerate(visit.given) if ct is not None]
    given = [visit.given[k] for k in wanted]
    try:
        _, vjp = _jax.vjp_of_some(lambda args: primal(*args), operands, visit.active, wanted)
        own = vjp(given)
    except Exception:  # the function has a rule because JAX cannot differentiate it
        return
    for i, ct, right in zip(visit.active, results, own, strict=True):
        ct = or_zeros(ct, operands[i])
        measured.note("rule", visit.here, i, norms_of_rule, ct, right, given[0])


def look_into_rule(measured: MeasuredPass, visit: Visit) -> None:
    """Measures the operations inside of a rule: the backward of a VJP, the transpose of a JVP.

    A rule is traced as if every input were differentiated. A rule with `symbolic_zeros` may act
    differently if fewer are; it is then left out."""
    node, operands = visit.here.node, visit.operands
    assert isinstance(node, CustomGradient)
    flowing = [
        _jax.zeros_of(v.aval) if ct is None else ct
        for v, ct in zip(node.outputs, visit.given, strict=True)
        if has_gradient(v)
    ]
    count = len(node.outputs)
    may_vary = {i for i, v in enumerate(node.inputs) if has_gradient(v) and i >= node.closed_over}
    if node.params.get("symbolic_zeros") and not may_vary.issubset(visit.active):
        return
    if node.kind == "vjp":
        with measured.mute():
            outs, _ = measured.forward(node.face("forward"), operands, ())
        given = [*outs[count:], *flowing]
        measured.forward(node.face("backward"), given, visit.here.into("backward"))
        return
    rule, path = node.face("jvp"), visit.here.into("jvp")
    has_tangent = [has_gradient(v) for v in node.inputs]
    tangents = [_jax.zeros_of(v.aval) for v in node.inputs if has_gradient(v)]
    with measured.mute():
        _, values = measured.forward(rule, [*operands, *tangents], path)
    which = [w for w, has in zip(visit.wanted, has_tangent, strict=True) if has]
    wanted = [False] * len(operands) + which
    measured.backward(rule, values, [*[None] * count, *flowing], wanted, path)
