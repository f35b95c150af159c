"""Functions with a tangent or a cotangent that this package gives them: one builder of each kind.

A derivative that holds at every order needs a forward pass that meets the rule again. For a
`jax.custom_vjp` the forward pass calls the rule. For a `jax.custom_jvp` the rule calls its own
function, for the results that it returns: where that is in a scan, older JAX takes what stands in
the function instead (`compat.SCANS_DROP_RULES`), which `keeping_rule` mends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import ad, batching, mlir  # noqa: TID251 (see `identity_primitive`)

from tracegrad._jax import compat
from tracegrad._jax.arrays import has_gradient
from tracegrad._jax.derivatives import jvp, of_some

# keep(inputs, results, perturbed)
Keep = Callable[[tuple[Any, ...], Any, Sequence[bool]], Any]


def with_tangent(
    run: Callable[..., Any],
    tangent: Callable[[Sequence[Any], Sequence[Any]], Any],
    name: str | None = None,
) -> Callable[..., Any]:
    """A function whose tangent is ``tangent(primals, tangents)``, at any order.

    `tangent` is called where an operand is differentiated, and may raise. A mark on it marks the
    rule (`ir.frames`). `name` is what programs call the function; default: its own name.
    """
    run.__name__ = run.__qualname__ = name or run.__name__
    rule: Any = jax.custom_jvp(run)

    @functools.wraps(tangent)
    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        flowing = tangent(primals, tangents)
        return keeping_rule(rule, primals), flowing

    rule.defjvp(jvp)
    return rule  # type: ignore[no-any-return]


def with_cotangent(
    change: Callable[[Any], Any],
    name: str = "identity",
    forward: Callable[[Any], Any] = lambda value: value,
    run: Callable[[Any], Any] = lambda value: value,
    *,
    symbolic_zeros: bool = False,
) -> Callable[[Any], Any]:
    """The identity, whose cotangent is ``change(cotangent)``; in derivatives of derivatives it is
    the identity, so that forward mode over reverse mode has them too.

    Args:
      change: is given a `SymbolicZero` with `symbolic_zeros`, and may return None. A mark on it
        marks the rule (`ir.frames`).
      forward, run: what stands for the identity where it is differentiated, and where it is not.
    """

    def identity(value: Any) -> Any:
        return run(value)

    @functools.wraps(change)
    def backward(_: None, cotangent: Any) -> tuple[Any]:
        return (change(cotangent),)

    identity.__name__ = identity.__qualname__ = name
    rule = jax.custom_vjp(identity)
    rule.defvjp(
        lambda value: (forward(value.value if symbolic_zeros else value), None),
        backward,
        symbolic_zeros=symbolic_zeros,
    )
    return rule


def with_backward(
    run: Callable[..., Any],
    backward: Callable[[Any, Sequence[bool], Any], tuple[Any, ...]],
    keep: Keep = lambda inputs, results, perturbed: (inputs, results),
    *,
    symbolic_zeros: bool = False,
) -> Callable[..., Any]:
    """A function whose gradients are ``backward(kept, perturbed, cotangents)``, at any order.

    Args:
      run: the function, of trees to a tree.
      backward: gives one gradient, or None, for each argument of the function. `perturbed` says of
        each leaf of the arguments whether it is differentiated; () without `symbolic_zeros`. A mark
        on it marks the rule (`ir.frames`).
      keep: ``keep(inputs, results, perturbed)`` is what the backward pass is given. The results
        have the rule's derivative.
      symbolic_zeros: whether cotangents that are zero by structure are a `SymbolicZero`.
    """
    rule = jax.custom_vjp(run)

    def forward(*inputs: Any) -> Any:
        perturbed = []
        if symbolic_zeros:
            perturbed = [leaf.perturbed for leaf in jax.tree.leaves(inputs)]
            inputs = jax.tree.map(lambda leaf: leaf.value, inputs)
        results = bound(*inputs)
        # What is static goes to the backward pass in the structure of what is kept for it.
        static = [() if moves else None for moves in perturbed]
        return results, (keep(inputs, results, perturbed), static)

    @functools.wraps(backward)
    def back(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        kept, static = residuals
        return backward(kept, [each is not None for each in static], cotangents)

    rule.defvjp(forward, back, symbolic_zeros=symbolic_zeros)
    bound = or_plain(rule, run)
    return bound if symbolic_zeros else rule


def or_plain(rule: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that is told about symbolic zeros, or just its function where JAX cannot apply that
    and nothing is differentiated.

    That is in the body of a shard_map outside jit. What differentiates the function does so inside
    the body, and is done when the rule gets there.
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


# ------------------------------------------------------------------ results that keep their rule

_RESULTS: Any = jex.Primitive("results_of_custom_jvp")
_RESULTS.multiple_results = True


def keeping_rule(function: Callable[..., Any], primals: Sequence[Any], results: Any = None) -> Any:
    """``function(*primals)``, which is differentiated by the rule of the function, at any order.

    `results`: those, where the rule has computed them so that newer JAX keeps their derivative.
    """
    leaves, tree = jax.tree.flatten(primals)

    def run(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    if compat.SCANS_DROP_RULES:
        program, shape = jax.make_jaxpr(function, return_shape=True)(*primals)
        if not program.effects:  # a primitive would have to have them, in their order
            return jax.tree.unflatten(jax.tree.structure(shape), _RESULTS.bind(*leaves, run=run))
    return function(*primals) if results is None else results


def _run(*leaves: Any, run: Callable[..., list[Any]]) -> list[Any]:
    return run(*leaves)


def _types(*avals: Any, run: Callable[..., list[Any]]) -> list[Any]:
    return list(jax.make_jaxpr(run)(*avals).out_avals)


def _jvp(primals: Any, tangents: Any, *, run: Callable[..., list[Any]]) -> tuple[Any, Any]:
    active = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    along = of_some(lambda leaves: run(*leaves), primals, active)
    outs, flowing = jvp(along, [primals[i] for i in active], [tangents[i] for i in active])
    return outs, [
        tangent if has_gradient(out) else ad.Zero(jax.typeof(out).to_tangent_aval())
        for out, tangent in zip(outs, flowing, strict=True)
    ]


def _batch(args: Any, axes: Any, *, run: Callable[..., list[Any]]) -> tuple[Any, Any]:
    outs = _RESULTS.bind(*args, run=jax.vmap(run, in_axes=tuple(axes)))
    return outs, [0] * len(outs)


_RESULTS.def_impl(_run)
_RESULTS.def_abstract_eval(_types)
ad.primitive_jvps[_RESULTS] = _jvp
batching.primitive_batchers[_RESULTS] = _batch
mlir.register_lowering(_RESULTS, mlir.lower_fun(_run, multiple_results=True))
