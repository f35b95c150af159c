"""Gives nodes and functions another derivative: a function of cotangents, or of tangents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from tracegrad import _jax
from tracegrad.ir.closures import may_hold_tracers
from tracegrad.ir.editing import Op
from tracegrad.ir.frames import CHANGES_GRADIENT
from tracegrad.rewriting.operation import GradientOperation, check_cotangents
from tracegrad.rewriting.traced_gradients import instantiate_zeros, with_traced_gradient
from tracegrad.tracing.in_force import without_rules
from tracegrad.tracing.signatures import require_takes

GradientFunction = Callable[..., Any]


def require_gradient_function(grad: GradientFunction) -> None:
    require_takes(grad, 2, "gradient function grad(op, *dys)")


def overriding(grad: GradientFunction, name: str | None = None) -> Callable[..., list[Any]]:
    """Returns ``function(op, *operands)``, which gives a match another gradient. `name` is the name
    of the function with the custom gradient; default: the name of the match."""

    def overridden(op: Op, *operands: Any) -> list[Any]:
        def primal(*operands: Any) -> list[Any]:
            return op.results(*operands)

        primal.__name__ = primal.__qualname__ = name or op.name
        return with_gradient(primal, grad, op.params, op.name, op.match.origin)(*operands)

    return overridden


def with_gradient(
    primal: Callable[..., list[Any]],
    grad: GradientFunction,
    params: Any,
    name: str,
    where: object,
    passes_active: bool = False,
) -> Callable[..., list[Any]]:
    """Returns `primal`, a function from arrays to a list of arrays, with the gradient function
    ``grad(op, *dys)``; with `passes_active`, ``grad(op, *dys, active=positions)``, with the
    positions of the differentiated inputs. `params` and `name` are attributes of `op`, and `where`
    is the place of the operation, for messages."""

    def gradient(
        inputs: Any, outputs: Any, dys: Sequence[Any], **options: Sequence[int]
    ) -> tuple[Any, ...]:
        op = GradientOperation(inputs, outputs, params, name)
        with without_rules():  # else this rule would apply to derivatives that `grad` takes
            answer = grad(op, *dys, **options)
        return check_cotangents(answer, op, where, grad)

    @CHANGES_GRADIENT
    def backward(
        kept: Any, perturbed: Sequence[bool], cotangents: Sequence[Any]
    ) -> tuple[Any, ...]:
        inputs, outputs = kept
        active = [i for i, moves in enumerate(perturbed) if moves]
        options = {"active": active} if passes_active else {}
        return gradient(inputs, outputs, instantiate_zeros(cotangents, outputs), **options)

    def traced(*operands: Any) -> list[Any]:
        results = jax.eval_shape(primal, *operands)
        return with_traced_gradient(primal, gradient, operands, results, backward)

    if not passes_active and may_hold_tracers(grad):
        return traced
    return _jax.with_backward(primal, backward, symbolic_zeros=passes_active)


def with_tangents(
    primal: Callable[..., list[Any]], name: str, differentiated: Callable[..., Any]
) -> Callable[..., list[Any]]:
    """Returns `primal`, a function from arrays to a list of arrays, with a JVP.
    ``differentiated(primals, active, tangents)`` returns the results and their tangents; `tangents`
    are the tangents of the operands at the positions `active`."""
    primal.__name__ = primal.__qualname__ = name
    rule: Any = jax.custom_jvp(primal)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        active = [
            i
            for i, (value, tangent) in enumerate(zip(primals, tangents, strict=True))
            if not isinstance(tangent, SymbolicZero) and _jax.has_gradient(jax.typeof(value))
        ]
        return differentiated(primals, active, [tangents[i] for i in active])

    rule.defjvp(jvp, symbolic_zeros=True)
    return rule  # type: ignore[no-any-return]
