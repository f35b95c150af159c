"""Compares the gradients of custom rules with the derivatives of their functions.

It also measures the operations inside of a rule, since a NaN may begin there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.pull_back import node_vjp
from tracegrad.insight.explaining import by_rule
from tracegrad.insight.explaining.observed import Observed
from tracegrad.insight.explaining.statistics import norms_of_rule
from tracegrad.insight.explaining.visits import Visit, first_of, is_in_scan, or_zeros, zeros_of
from tracegrad.insight.explanation import Finding, number_text
from tracegrad.ir import CustomGradient, Graph, Occurrence, Value, has_gradient
from tracegrad.ir.authors import code_of_rule
from tracegrad.ir.frames import OF_HOST_CALL
from tracegrad.ir.occurrence import Path, line_of_error
from tracegrad.tracing.rule_errors import CLOSES_OVER, dtype_advice

if TYPE_CHECKING:
    from tracegrad.insight.explaining.measuring import MeasuredPass


_ALL = -1  # stands for all inputs of a rule together
_TOLERANCE = 0.03


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
        of = "has along some direction a slope" if i == _ALL else f"gives input {i} a gradient"
        yield Finding.of(
            found,
            "changed by a rule",
            f"the rule of {found.node.name} {of} of norm {number_text(given)}; the derivative of "
            f"the function has {number_text(own)}, the difference {number_text(apart)}",
            problem=False,
            cure="check it by `check_grads`, or declare it deliberate there",
            by_rule=by_rule.NOTHING if i == _ALL else by_rule.own_derivative(found),
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


def of_right_dtypes(measured: MeasuredPass, visit: Visit, results: Sequence[Any]) -> list[Any]:
    """Returns a rule's cotangents; inside a scan, where JAX requires the dtype of the input, casts
    those of another dtype and notes that JAX refuses them."""
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
    # The derivative of a host call is unknown, and effects would happen once more.
    if visit.here.node.effects or code_of_rule(visit.here.node) in OF_HOST_CALL:
        return
    primal, operands = visit.here.node.primal, visit.operands
    # A loop whose number of steps depends on its values often searches a root: JAX's derivative
    # does not exist, or is that of the search.
    if _jax.WHILE.name in primal.operations:
        _compare_by_differences(measured, visit, results)
        return
    refused = dict(measured.refused)
    try:
        with measured.mute():
            _, inside = measured.forward(primal, operands, ())
            own = measured.backward(primal, inside, visit.given, visit.wanted, ())
    except Exception:  # the function has a rule because JAX cannot differentiate it
        return
    finally:
        is_refused, measured.refused = measured.refused != refused, refused
    if is_refused:
        return
    for i, ct in zip(visit.active, results, strict=True):
        pair = or_zeros(ct, operands[i]), or_zeros(own[i], operands[i])
        measured.note("rule", visit.here, i, norms_of_rule, *pair, first_of(visit.given))


def _compare_by_differences(measured: MeasuredPass, visit: Visit, results: Sequence[Any]) -> None:
    """Measures how a rule's slope along some direction in all its operands differs from finite
    differences of its function. The slopes differ if they do by more than both the differences at
    two distances, and a few per cent, since the loop in the function stops at some tolerance."""
    node, operands, given = visit.here.node, visit.operands, visit.given
    assert isinstance(node, CustomGradient)
    directions, terms, wide = {}, [], jnp.result_type(float)
    finfo: Any = jnp.finfo  # knows bfloat16, too
    for i, ct in zip(visit.active, results, strict=True):
        sizes = jnp.abs(operands[i])
        spread = jnp.sqrt(jnp.mean(jnp.square(sizes)))
        angles = jnp.arange(sizes.size).reshape(sizes.shape) + i  # in radians: as good as random
        direction = jnp.cos(angles).astype(sizes.dtype)
        directions[i] = direction * jnp.where(spread > 0, spread, 1)
        if ct is not None:
            terms.append(jnp.ravel(jnp.real(ct * directions[i]).astype(wide)))
    h = max(float(finfo(v.dtype).eps) for v in directions.values()) ** (1 / 3)

    def results_at(distance: Any) -> list[Any]:
        moved = list(operands)
        for i, direction in directions.items():
            moved[i] = operands[i] + distance.astype(direction.dtype) * direction
        return node.primal(*moved)

    outs = jax.lax.map(results_at, h * jnp.array([1, -1, 0.25, -0.25]))

    def slope(k: int, h: float) -> Any:
        changes = [
            jnp.sum(jnp.real((out[k] - out[k + 1]) * ct).astype(wide))
            for out, ct in zip(outs, given, strict=True)
            if ct is not None
        ]
        return sum(changes) / (2 * h)

    far, near = slope(0, h), slope(2, h / 4)
    every = jnp.concatenate(terms) if terms else jnp.zeros(1)
    rule = jnp.sum(every)
    error = 2 * jnp.abs(far - near) + _TOLERANCE * jnp.linalg.norm(every)
    own = jnp.where(jnp.abs(near - rule) > error, near, rule)
    measured.note("rule", visit.here, _ALL, norms_of_rule, rule, own, jnp.zeros(()))


def look_into_rule(measured: MeasuredPass, visit: Visit) -> None:
    """Measures the operations inside of a rule: the backward of a VJP, the transpose of a JVP.

    A rule is traced as if every input were differentiated. A rule with `symbolic_zeros` may act
    differently if fewer are; it is then left out."""
    node, operands = visit.here.node, visit.operands
    assert isinstance(node, CustomGradient)
    flowing = [
        zeros_of(v) if ct is None else ct
        for v, ct in zip(node.outputs, visit.given, strict=True)
        if has_gradient(v)
    ]
    count = len(node.outputs)
    if node.kind == "vjp":
        _find_line(measured, visit)
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
    tangents = [zeros_of(v) for v, has in zip(node.inputs, has_tangent, strict=True) if has]
    with measured.mute():
        _, values = measured.forward(rule, [*operands, *tangents], path)
    which = [w for w, has in zip(visit.wanted, has_tangent, strict=True) if has]
    wanted = [False] * len(operands) + which
    measured.backward(rule, values, [*[None] * count, *flowing], wanted, path)


def _find_line(measured: MeasuredPass, visit: Visit) -> None:
    """Notes the line of a rule's backward that makes a NaN or Inf.

    In a trace all operations of a backward have the line of the forward call. So the Python
    function is run once more without jit; JAX's own check after every operation raises at the line.
    """
    arrays = [x for x in (*visit.operands, *visit.given) if x is not None]
    if any(map(_jax.is_tracer, arrays)) or not all(_all_finite(x) for x in arrays):
        return
    try:
        with jax.disable_jit(), jax.debug_nans(True), jax.debug_infs(True):
            node_vjp(measured.walk, visit.here.node, visit.kept.values, visit.given, visit.active)
    except FloatingPointError as error:
        line = line_of_error(error.__traceback__)
        if line is not None:
            measured.lines[visit.here] = line
    except Exception:  # the rule runs only compiled, so that there is no line to find
        return


def _all_finite(x: Any) -> bool:
    is_number = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return not is_number or bool(jnp.all(jnp.isfinite(x)))
