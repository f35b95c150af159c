"""Nodes and functions with another derivative, by what gives their cotangents or tangents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tracegrad import _jax
from tracegrad.ir.closed_over import may_hold_tracers
from tracegrad.ir.editing import Op
from tracegrad.ir.frames import CHANGES_GRADIENT
from tracegrad.rewriting.operation import GradientOperation, checked_cotangents
from tracegrad.tracing.in_force import without_rules
from tracegrad.tracing.signatures import require_takes

GradientFunction = Callable[..., Any]


def require_gradient_function(grad: GradientFunction) -> None:
    """Raises TypeError for what cannot be called as ``grad(op, dy)``."""
    require_takes(grad, 2, "gradient function grad(op, *dys)")


def overriding(grad: GradientFunction, name: str | None = None) -> Callable[..., list[Any]]:
    """What gives a match another gradient, as ``function(op, *operands)``; `name`: what the
    function with the rule is called, default: as the match."""

    def overridden(op: Op, *operands: Any) -> list[Any]:
        def primal(*operands: Any) -> list[Any]:
            return op.results(*operands)

        primal.__name__ = primal.__qualname__ = name or op.name
        how = op.params, op.name, op.match.origin
        if may_hold_tracers(grad):
            return _with_operands(primal, operands, grad, *how)
        return with_gradient(primal, grad, *how)(*operands)

    return overridden


def _with_operands(
    primal: Callable[..., list[Any]],
    operands: Sequence[Any],
    grad: GradientFunction,
    params: Any,
    name: str,
    where: object,
) -> list[Any]:
    """The results of a function with the gradient that `grad` gives, which may close over values of
    a trace. These become operands: JAX has no place for them in a rule inside of a region."""
    trees: list[Any] = []

    def flat(inputs: Any, outputs: Any, dys: Any) -> list[Any]:
        op = GradientOperation(inputs, outputs, params, name)
        with without_rules():
            cotangents = checked_cotangents(grad(op, *dys), op, where, grad)
        leaves, tree = jax.tree.flatten(cotangents)
        trees[:] = [tree]
        return leaves

    outputs = jax.eval_shape(primal, *operands)
    try:
        open_form, arrays = _jax.parts_of(jax.make_jaxpr(flat)(operands, outputs, outputs))
    except Exception:  # it says so again when a gradient is taken, if one is
        return with_gradient(primal, grad, params, name, where)(*operands)
    places = [i for i, array in enumerate(arrays) if _jax.is_tracer(array)]
    count = len(operands)

    def of_operands(op: GradientOperation, *dys: Any) -> list[Any]:
        constants = list(arrays)
        for i, value in zip(places, op.inputs[count:], strict=True):
            constants[i] = value
        found = jax.core.eval_jaxpr(open_form, constants, *op.inputs[:count], *op.outputs, *dys)
        return [*jax.tree.unflatten(trees[0], found), *[None] * len(places)]

    def of_first(*inputs: Any) -> list[Any]:
        return primal(*inputs[:count])

    of_first.__name__ = of_first.__qualname__ = primal.__name__
    rule = with_gradient(of_first, of_operands if places else grad, params, name, where)
    return rule(*operands, *(arrays[i] for i in places))


def with_gradient(
    primal: Callable[..., list[Any]],
    grad: GradientFunction,
    params: Any,
    name: str,
    where: object,
    is_told: bool = False,
) -> Callable[..., list[Any]]:
    """A function of arrays with the gradient that ``grad(op, *dys)`` gives it; if it `is_told`
    which inputs are differentiated, ``grad(op, *dys, active=positions)``."""
    rule = jax.custom_vjp(primal)

    def forward(*inputs: Any) -> Any:
        # What is static goes to the backward pass in the structure of what is kept for it.
        varies = [() if is_told and x.perturbed else None for x in inputs]
        inputs = tuple([x.value for x in inputs]) if is_told else inputs
        # By the rule again, so that derivatives of the outputs of any order go by it.
        outputs = rule(*inputs)
        return outputs, (inputs, outputs, varies)

    @CHANGES_GRADIENT
    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        inputs, outputs, varies = residuals
        op = GradientOperation(inputs, outputs, params, name)
        dys = [
            dy
            if _jax.has_gradient(out) and not isinstance(dy, SymbolicZero)
            else jnp.zeros_like(out)
            for dy, out in zip(cotangents, outputs, strict=True)
        ]
        active = [i for i, each in enumerate(varies) if each is not None]
        with without_rules():  # or a derivative that `grad` takes would go by this very rule
            answer = grad(op, *dys, active=active) if is_told else grad(op, *dys)
        return checked_cotangents(answer, op, where, grad)

    rule.defvjp(forward, backward, symbolic_zeros=is_told)
    return rule


def with_tangent(tangent: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Gives a function another derivative, at any order: ``tangent(primals, tangents)`` returns the
    tangent of its result."""

    def decorate(function: Callable[..., Any]) -> Any:
        ruled: Any = jax.custom_jvp(function)

        @CHANGES_GRADIENT
        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            return _jax.keeping_rule(ruled, primals), tangent(primals, tangents)

        ruled.defjvp(rule)
        return ruled

    return decorate


def with_tangents(
    primal: Callable[..., list[Any]], name: str, differentiated: Callable[..., Any]
) -> Callable[..., list[Any]]:
    """A function of arrays with a JVP: ``differentiated(primals, active, tangents)`` gives the
    results, and their tangents from those of the operands at the positions `active`."""
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
