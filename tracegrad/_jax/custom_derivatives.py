"""Builds functions with custom derivatives: a JVP rule (`with_tangent`) or a VJP rule
(`with_cotangent`, `with_backward`).

A rule holds at every order if its forward pass calls the function with the rule. The forward pass
of `with_backward` does so, and the JVP rule of `with_tangent` does so for the primal results. In a
scan, older JAX then differentiates the body of the function and drops the rule
(`compat.SCANS_DROP_RULES`); `call_keeping_rule` prevents that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir  # noqa: TID251 (for the rules of `_RESULTS`)

from tracegrad._jax import compat
from tracegrad._jax.arrays import has_gradient
from tracegrad._jax.derivatives import jvp, of_some

Keep = Callable[[tuple[Any, ...], Any], Any]  # (inputs, results) -> residuals


def zeros_of(aval: Any) -> Any:
    """Returns zeros of a type, with the type's sharding over explicit axes and its varying axes."""
    if jax.sharding.get_abstract_mesh().empty:  # JAX shards only over a mesh in use
        return jnp.zeros(aval.shape, aval.dtype)
    return ad.instantiate_zeros(ad.Zero(aval))  # type: ignore[no-untyped-call]


def with_tangent(
    run: Callable[..., Any],
    tangent: Callable[[Sequence[Any], Sequence[Any]], Any],
    name: str | None = None,
    *,
    at_any_order: bool = True,
) -> Callable[..., Any]:
    """Returns `run` as a `jax.custom_jvp` function.

    Args:
      tangent: ``tangent(primals, tangents)`` returns the tangents of the results; called only if an
        operand is differentiated; may raise. A mark on `tangent` also marks the rule (see
        `ir.frames`).
      name: the function's name in traced programs, set on `run` itself; default: ``run.__name__``.
      at_any_order: whether the rule holds at any order; if not, second derivatives differentiate
        `run` and `tangent`.
    """
    run.__name__ = run.__qualname__ = name or run.__name__
    rule: Any = jax.custom_jvp(run)

    @functools.wraps(tangent)
    def jvp_rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        out_tangents = tangent(primals, tangents)
        return call_keeping_rule(rule, primals) if at_any_order else run(*primals), out_tangents

    rule.defjvp(jvp_rule)
    return rule  # type: ignore[no-any-return]


def with_cotangent(change: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    """Returns an identity function whose VJP rule is ``change(cotangent)``.

    The forward pass of the rule is a plain identity, without the rule. So a second derivative is
    that of an identity, and forward mode over reverse mode works.

    Args:
      change: maps the cotangent of the result to the cotangent of the argument, or to None. A mark
        on `change` also marks the rule (see `ir.frames`).
      name: the function's name in traced programs.
    """

    def identity(value: Any) -> Any:
        return value

    @functools.wraps(change)
    def backward(_: None, cotangent: Any) -> tuple[Any]:
        return (change(cotangent),)

    identity.__name__ = identity.__qualname__ = name
    rule = jax.custom_vjp(identity)
    rule.defvjp(lambda value: (value, None), backward)
    return rule


def with_backward(
    run: Callable[..., Any],
    backward: Callable[[Any, Sequence[bool], Any], tuple[Any, ...]],
    keep: Keep = lambda inputs, results: (inputs, results),
    *,
    symbolic_zeros: bool = False,
) -> Callable[..., Any]:
    """Returns `run` as a `jax.custom_vjp` function; its rule holds at any order.

    Args:
      run: the function; its arguments and its result are pytrees.
      backward: ``backward(kept, perturbed, cotangents)`` returns one gradient, or None, for each
        argument of `run`. `perturbed` has one bool for each leaf of the arguments: whether the
        leaf is differentiated. Without `symbolic_zeros`, `perturbed` is empty. A mark on
        `backward` also marks the rule (see `ir.frames`).
      keep: ``keep(inputs, results)`` returns `kept`, the residuals for `backward`, always as the
        same tree. Differentiating `results` applies the rule again.
      symbolic_zeros: whether `backward` gets a `SymbolicZero` for a cotangent that is zero by
        structure.
    """
    rule = jax.custom_vjp(run)

    def forward(*inputs: Any) -> Any:
        perturbed = []
        if symbolic_zeros:
            perturbed = [leaf.perturbed for leaf in jax.tree.leaves(inputs)]
            inputs = jax.tree.map(lambda leaf: leaf.value, inputs)
        results = bound(*inputs)
        # `perturbed` is static. The shapes of empty arrays encode it, and not the tree: a program
        # of JAX keeps one tree of residuals for all combinations of perturbed inputs.
        flags = [jnp.zeros((0,) * (1 + is_perturbed), bool) for is_perturbed in perturbed]
        return results, (keep(inputs, results), flags)

    @functools.wraps(backward)
    def back(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        kept, flags = residuals
        return backward(kept, [flag.ndim == 2 for flag in flags], cotangents)

    rule.defvjp(forward, back, symbolic_zeros=symbolic_zeros)
    bound = with_fallback(rule, run)
    return bound if symbolic_zeros else rule


def with_fallback(rule: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `rule` or, in a place where JAX does not support `rule`, `run`.

    JAX raises NotImplementedError for a rule with symbolic zeros in the body of a shard_map outside
    jit. Calling `run` loses no derivative: a transformation that differentiates the function is
    inside the body, and has applied the rule before the shard_map gets the call.
    """

    @functools.wraps(run)
    def bound(*inputs: Any) -> Any:
        try:
            return rule(*inputs)
        except NotImplementedError as error:
            if "symbolic_zeros support with shard_map" not in str(error):
                raise
        return run(*inputs)

    return bound


# --------------------------------------------------------- primal results that keep the JVP rule

_RESULTS: Any = jex.Primitive("results_of_custom_jvp")
_RESULTS.multiple_results = True


def call_keeping_rule(function: Callable[..., Any], primals: Sequence[Any]) -> Any:
    """Returns ``function(*primals)``, whose derivatives apply the function's rule at any order."""
    leaves, tree = jax.tree.flatten(primals)

    def run(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    if compat.SCANS_DROP_RULES:
        program, shape = jax.make_jaxpr(function, return_shape=True)(*primals)
        if not program.effects:  # `_RESULTS` declares no effects
            return jax.tree.unflatten(jax.tree.structure(shape), _RESULTS.bind(*leaves, run=run))
    return function(*primals)


def _run_results(*leaves: Any, run: Callable[..., list[Any]]) -> list[Any]:
    return run(*leaves)


def _infer_types(*avals: Any, run: Callable[..., list[Any]]) -> list[Any]:
    return list(jax.make_jaxpr(run)(*avals).out_avals)


def _jvp(primals: Any, tangents: Any, *, run: Callable[..., list[Any]]) -> tuple[Any, Any]:
    active = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    of_active = of_some(lambda leaves: run(*leaves), primals, active)
    outs, out_tangents = jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])
    return outs, [
        tangent if has_gradient(out) else ad.Zero(jax.typeof(out).to_tangent_aval())
        for out, tangent in zip(outs, out_tangents, strict=True)
    ]


def _batch(args: Any, axes: Any, *, run: Callable[..., list[Any]]) -> tuple[Any, Any]:
    outs = _RESULTS.bind(*args, run=jax.vmap(run, in_axes=tuple(axes)))
    return outs, [0] * len(outs)


_RESULTS.def_impl(_run_results)
_RESULTS.def_abstract_eval(_infer_types)
ad.primitive_jvps[_RESULTS] = _jvp
batching.primitive_batchers[_RESULTS] = _batch
mlir.register_lowering(_RESULTS, mlir.lower_fun(_run_results, multiple_results=True))
