"""The rules of the primitive `checkpointed_while`, a `while` loop with reverse mode.

JAX's own rules for `while` lower and batch the loop, and differentiate it in forward mode; each
loop that such a rule makes becomes a `checkpointed_while` again. So the loop compiles to the same
code as JAX's loop, unless it is differentiated in reverse. `loop_reverse` has the rules for reverse
mode.

The rules are registered in the tables that JAX's documentation of new primitives uses, as in
`_jax.identity_primitive`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad as _ad  # noqa: TID251
from jax.interpreters import batching, mlir  # noqa: TID251
from jax.interpreters import partial_eval as _pe  # noqa: TID251

from tracegrad import _jax

WHILE: Any = _jax.WHILE
CHECKPOINTED_WHILE = _jax.CHECKPOINTED_WHILE
ad: Any = _ad  # some of its functions have type annotations, and others do not
pe: Any = _pe

_OURS = ("checkpoints", "place")


def split_params(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the parameters of JAX's loop and our own."""
    ours = {name: params[name] for name in _OURS}
    return {k: v for k, v in params.items() if k not in _OURS}, ours


def _to_checkpointed(equation: Any, ours: Mapping[str, Any]) -> Any:
    if equation is None or equation.primitive is not WHILE:
        return equation
    return equation.replace(primitive=CHECKPOINTED_WHILE, params={**equation.params, **ours})


def _run_with_ours(program: Any, args: Sequence[Any], ours: Mapping[str, Any]) -> list[Any]:
    """Loops inside of loops stay JAX's."""
    body = _jax.opened(program)
    edited = body.replace(eqns=[_to_checkpointed(equation, ours) for equation in body.eqns])
    return list(jax.core.eval_jaxpr(edited, _jax.constants_of(program), *args))


def _trace_afresh(run: Callable[..., Any], args: Any) -> Any:
    # A fresh function: JAX caches traces by the identity of the function.
    return jax.make_jaxpr(lambda *args: run(*args))(*jax.tree.map(jax.typeof, args))


def checkpointed_while_loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    init: Any,
    params: Mapping[str, Any],
) -> Any:
    """`params` has `checkpoints` and `place`."""
    ours = {name: params[name] for name in _OURS}
    leaves, tree = jax.tree.flatten(init)

    def run(*leaves: Any) -> list[Any]:
        final = lax.while_loop(condition, body, jax.tree.unflatten(tree, leaves))
        return jax.tree.leaves(final)

    return jax.tree.unflatten(tree, _run_with_ours(_trace_afresh(run, leaves), leaves, ours))


# ------------------------------------------------------------------- rules made from JAX's own


def _abstract_eval(*avals: Any, **params: Any) -> Any:
    return WHILE.abstract_eval(*avals, **split_params(params)[0])


def _bind_while(*args: Any, **params: Any) -> Any:
    return WHILE.bind(*args, **split_params(params)[0])


def batch_loop(axis: Any, args: Any, places: Any, **params: Any) -> Any:
    own, ours = split_params(params)
    found: list[Any] = []

    def run(*args: Any) -> Any:
        outs, found[:] = batching.fancy_primitive_batchers[WHILE](axis, args, places, **own)
        return outs

    program = _trace_afresh(run, args)
    return _run_with_ours(program, args, ours), found


def differentiate_forward(primals: Any, tangents: Any, **params: Any) -> Any:
    """The JVP of a `checkpointed_while`: JAX's JVP of `while`, in which the loop is ours."""
    own, ours = split_params(params)
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    found: list[Any] = []

    def run(primals: Any, given: Any) -> Any:
        all_tangents = list(tangents)
        for i, tangent in zip(moving, given, strict=True):
            all_tangents[i] = tangent
        outs, made = ad.primitive_jvps[WHILE](primals, all_tangents, **own)
        # Keep only symbolic zeros: a tracer must not outlive its trace.
        found[:] = [tangent if type(tangent) is ad.Zero else None for tangent in made]
        return outs, [tangent for tangent in made if type(tangent) is not ad.Zero]

    given = [tangents[i] for i in moving]
    program = _trace_afresh(run, (list(primals), given))
    results = _run_with_ours(program, [*primals, *given], ours)
    flowing = iter(results[len(found) :])
    outs = [out if type(out) is ad.Zero else next(flowing) for out in found]
    return results[: len(found)], outs


def _eliminate_dead_code(*args: Any) -> Any:
    *rest, equation = args
    own, ours = split_params(equation.params)
    (*used, equation) = pe.dce_rules[WHILE](*rest, equation.replace(primitive=WHILE, params=own))
    return (*used, _to_checkpointed(equation, ours))


def _partial_eval(saveable: Any, unknown: Any, written: Any, equation: Any) -> Any:
    """The rule for `jax.checkpoint`, which keeps no states: the known part, and the whole loop."""
    own, ours = split_params(equation.params)
    known, staged, *rest = pe.partial_eval_jaxpr_custom_rules[WHILE](
        saveable, unknown, written, equation.replace(primitive=WHILE, params=own)
    )
    return _to_checkpointed(known, ours), _to_checkpointed(staged, ours), *rest


CHECKPOINTED_WHILE.multiple_results = True
CHECKPOINTED_WHILE.def_impl(_bind_while)
CHECKPOINTED_WHILE.def_effectful_abstract_eval(_abstract_eval)
mlir.register_lowering(CHECKPOINTED_WHILE, mlir.lower_fun(_bind_while, multiple_results=True))
batching.fancy_primitive_batchers[CHECKPOINTED_WHILE] = batch_loop
ad.primitive_jvps[CHECKPOINTED_WHILE] = differentiate_forward
pe.partial_eval_jaxpr_custom_rules[CHECKPOINTED_WHILE] = _partial_eval
if WHILE in pe.dce_rules:  # from 0.12 on
    pe.dce_rules[CHECKPOINTED_WHILE] = _eliminate_dead_code
