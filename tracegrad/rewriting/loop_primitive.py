"""The rules of the primitive `checkpointed_while`, a `while` loop with reverse mode.

Lowering, batching and forward mode run JAX's rules for `while`. Each `while` that such a rule makes
becomes a `checkpointed_while` again. So the loop compiles to the same code as JAX's loop, unless it
is differentiated in reverse. `loop_reverse` has the rules for reverse mode.

The rules are registered in the tables that JAX's documentation of new primitives names, as in
`_jax.identity_primitive`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax
from jax.interpreters import ad as _ad  # noqa: TID251
from jax.interpreters import batching, mlir  # noqa: TID251
from jax.interpreters import partial_eval as _pe  # noqa: TID251

from tracegrad import _jax

WHILE: Any = _jax.WHILE
CHECKPOINTED_WHILE = _jax.CHECKPOINTED_WHILE
ad: Any = _ad  # `Any`: only some of its functions have type annotations
pe: Any = _pe

LINEAR_WHILE: Any = jex.Primitive("linear_while")
"""A `checkpointed_while` whose forward pass has run: its first operands are the values that the
forward pass kept, for the backward pass alone. The parameter `kept` is their number; `unknown` has
one bool for each of the other operands: whether it is a tangent."""

_ADDED_PARAMS = ("checkpoints", "place")
_OF_LINEAR = ("kept", "unknown")


def split_params(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the parameters of JAX's `while`, and the parameters that this package adds."""
    added = {name: params[name] for name in _ADDED_PARAMS}
    return {k: v for k, v in params.items() if k not in (*_ADDED_PARAMS, *_OF_LINEAR)}, added


def without_kept(values: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    return values[params.get("kept", 0) :]


def _make_checkpointed(equation: Any, added: Mapping[str, Any]) -> Any:
    if equation is None or equation.primitive is not WHILE:
        return equation
    return equation.replace(primitive=CHECKPOINTED_WHILE, params={**equation.params, **added})


def _run_checkpointed(program: Any, args: Sequence[Any], added: Mapping[str, Any]) -> list[Any]:
    """Runs a program in which each `while` becomes a `checkpointed_while`; a loop inside of a loop
    stays a `while`."""
    body = _jax.opened(program)
    edited = body.replace(eqns=[_make_checkpointed(equation, added) for equation in body.eqns])
    return list(jax.core.eval_jaxpr(edited, _jax.constants_of(program), *args))


def _trace_uncached(run: Callable[..., Any], args: Any) -> Any:
    # A new function: JAX caches traces by the identity of the function.
    return jax.make_jaxpr(lambda *args: run(*args))(*jax.tree.map(jax.typeof, args))


def checkpointed_while_loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    init: Any,
    params: Mapping[str, Any],
) -> Any:
    """Runs `jax.lax.while_loop` as a `checkpointed_while` with these `checkpoints` and `place`."""
    added = {name: params[name] for name in _ADDED_PARAMS}
    leaves, tree = jax.tree.flatten(init)

    def run(*leaves: Any) -> list[Any]:
        final = lax.while_loop(condition, body, jax.tree.unflatten(tree, leaves))
        return jax.tree.leaves(final)

    program = _trace_uncached(run, leaves)
    return jax.tree.unflatten(tree, _run_checkpointed(program, leaves, added))


# ------------------------------------------------------------------- rules made from JAX's own


def _abstract_eval(*avals: Any, **params: Any) -> Any:
    return WHILE.abstract_eval(*without_kept(avals, params), **split_params(params)[0])


def _bind_while(*args: Any, **params: Any) -> Any:
    return WHILE.bind(*without_kept(args, params), **split_params(params)[0])


def _batch_loop(axis_data: Any, args: Any, batch_dims: Any, **params: Any) -> Any:
    while_params, added = split_params(params)
    args, batch_dims = without_kept(args, params), without_kept(batch_dims, params)
    out_dims: list[Any] = []

    def run(*args: Any) -> Any:
        outs, out_dims[:] = batching.fancy_primitive_batchers[WHILE](
            axis_data, args, batch_dims, **while_params
        )
        return outs

    program = _trace_uncached(run, args)
    return _run_checkpointed(program, args, added), out_dims


def _differentiate_forward(primals: Any, tangents: Any, **params: Any) -> Any:
    """The JVP of a `checkpointed_while`: JAX's JVP of `while`, with its loop replaced."""
    while_params, added = split_params(params)
    primals, tangents = without_kept(primals, params), without_kept(tangents, params)
    nonzero_positions = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    zeros_or_none: list[Any] = []

    def run(primals: Any, nonzero_tangents: Any) -> Any:
        all_tangents = list(tangents)
        for i, tangent in zip(nonzero_positions, nonzero_tangents, strict=True):
            all_tangents[i] = tangent
        outs, out_tangents = ad.primitive_jvps[WHILE](primals, all_tangents, **while_params)
        # Keep the symbolic zeros alone: a tracer must not outlive its trace.
        zeros_or_none[:] = [
            tangent if type(tangent) is ad.Zero else None for tangent in out_tangents
        ]
        return outs, [tangent for tangent in out_tangents if type(tangent) is not ad.Zero]

    nonzero_tangents = [tangents[i] for i in nonzero_positions]
    program = _trace_uncached(run, (list(primals), nonzero_tangents))
    results = _run_checkpointed(program, [*primals, *nonzero_tangents], added)
    nonzero_out_tangents = iter(results[len(zeros_or_none) :])
    outs = [out if type(out) is ad.Zero else next(nonzero_out_tangents) for out in zeros_or_none]
    return results[: len(zeros_or_none)], outs


def _eliminate_dead_code(*args: Any) -> Any:
    *rest, equation = args
    while_params, added = split_params(equation.params)
    (*used, equation) = pe.dce_rules[WHILE](
        *rest, equation.replace(primitive=WHILE, params=while_params)
    )
    return (*used, _make_checkpointed(equation, added))


def _partial_eval(policy: Any, is_unknown: Any, instantiate: Any, equation: Any) -> Any:
    """The rule under `jax.checkpoint`: a loop for the known part, and the whole loop."""
    while_params, added = split_params(equation.params)
    known, staged, *rest = pe.partial_eval_jaxpr_custom_rules[WHILE](
        policy, is_unknown, instantiate, equation.replace(primitive=WHILE, params=while_params)
    )
    return _make_checkpointed(known, added), _make_checkpointed(staged, added), *rest


for _primitive in (CHECKPOINTED_WHILE, LINEAR_WHILE):
    _primitive.multiple_results = True
    _primitive.def_impl(_bind_while)
    _primitive.def_effectful_abstract_eval(_abstract_eval)
    mlir.register_lowering(_primitive, mlir.lower_fun(_bind_while, multiple_results=True))
    batching.fancy_primitive_batchers[_primitive] = _batch_loop
    ad.primitive_jvps[_primitive] = _differentiate_forward
pe.partial_eval_jaxpr_custom_rules[CHECKPOINTED_WHILE] = _partial_eval
if WHILE in pe.dce_rules:  # JAX >= 0.12
    pe.dce_rules[CHECKPOINTED_WHILE] = _eliminate_dead_code
