"""The results that the rule of a `jax.custom_jvp` returns, so that the rule is theirs as well.

A rule that holds for the second derivative too calls its own function for them. Where that is in a
scan, older JAX takes what stands in the function instead (`compat.SCANS_DROP_RULES`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import ad, batching, mlir  # noqa: TID251 (see `identity_primitive`)

from tracegrad._jax import compat
from tracegrad._jax.arrays import has_gradient
from tracegrad._jax.derivatives import jvp, of_some

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
