"""Runs programs of JAX with other arrays in the place of those that they close over.

JAX holds the arrays that a jitted function closes over as constants of its program, at any depth of
calls. There they would silently have no gradient: a tape makes them operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir.importer import import_program
from tracegrad.ir.running import run_graph
from tracegrad.rewriting.host_calls import TO_HOST

# By the identity of an array that a program closes over, what stands in its place.
Instead = Mapping[int, Any]
RULES = (_jax.CUSTOM_JVP, _jax.CUSTOM_VJP)


def evaluate(program: Any, args: Sequence[Any], instead: Instead, step: Any = None) -> list[Any]:
    """The results of a program, equation by equation, as it would be differentiated by a tape.

    What is handed to the host is, to differentiation, constant there.

    Args:
      program: of JAX.
      args: its operands.
      instead: what stands in the place of arrays that it closes over.
      step: in a loop, a value that is another one for each turn.
    """
    open_form, constants = _jax.parts_of(program)
    values = dict(zip(open_form.constvars, [instead.get(id(c), c) for c in constants], strict=True))
    values.update(zip(open_form.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for equation in open_form.eqns:
        operands = [read(atom) for atom in equation.invars]
        scope, settings = _jax.equation_context(equation.source_info, equation.ctx)
        with scope, settings:
            results = bind_with(equation.primitive, equation.params, operands, instead, step)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in open_form.outvars]


def bind_with(
    primitive: Any,
    params: Mapping[str, Any],
    args: Sequence[Any],
    instead: Instead,
    step: Any = None,
) -> list[Any]:
    """Binds an operation, as `evaluate` does."""
    if primitive is TO_HOST:
        return list(map(jax.lax.stop_gradient, args))
    facts = _jax.facts_below(params)
    effects = facts.has_effects and (
        step is not None or _jax.SCAN in (primitive, *facts.primitives)
    )
    edits = any(id(a) in instead for a in (*facts.arrays, *facts.numpy_arrays))
    if primitive in RULES or not _jax.sub_programs(params):
        if edits:
            raise closes_over_watched(_jax.traced_from(params["call_jaxpr"]).name)
        if step is not None and _has_effect(primitive, params, args):
            # JAX takes out of a scan that it differentiates what is the same at each turn, and
            # takes along what prints or calls the host there. It stays where it takes a branch.
            run = partial(_bound, primitive, params)
            return list(jax.lax.cond(step, run, lambda *operands: run(*operands), *args))
        return _jax.bind(primitive, args, params)
    if not (edits or effects or TO_HOST in facts.primitives):
        return _jax.bind(primitive, args, params)
    rebind = _REBIND.get(primitive)
    if rebind is None:
        if edits:
            raise NotImplementedError(
                f"a jitted function inside of {primitive.name} closes over an array that a tape "
                "follows: pass the array to it as an argument"
            )
        return _jax.bind(primitive, args, params)
    return list(rebind(params, args, partial(evaluate, instead=instead, step=step)))


def _bound(primitive: Any, params: Mapping[str, Any], *args: Any) -> list[Any]:
    return _jax.bind(primitive, args, params)


def _has_effect(primitive: Any, params: Mapping[str, Any], args: Sequence[Any]) -> bool:
    if any(_jax.is_reference(jax.typeof(arg)) for arg in args):
        return False
    return _jax.calls_host(primitive.name) or _jax.facts_below(params).has_effects


Evaluate = partial[list[Any]]


def _call(params: Mapping[str, Any], args: Sequence[Any], run: Evaluate) -> list[Any]:
    def called(*args: Any) -> list[Any]:
        return run(params["jaxpr"], args)

    called.__name__ = called.__qualname__ = str(params["name"])
    jitted: Callable[..., list[Any]] = jax.jit(called, inline=params["inline"])
    return jitted(*args)


def _scan(params: Mapping[str, Any], args: Sequence[Any], run: Evaluate) -> list[Any]:
    constants, carry = _jax.scan_split(params)
    first, slices = args[constants : constants + carry], args[constants + carry :]

    def body(carried: Any, xs: Any) -> Any:
        step, *rest = xs
        results = run(params["jaxpr"], [*args[:constants], *carried, *rest], step=step)
        return results[:carry], results[carry:]

    around = run.keywords["step"]  # of a loop around this one
    steps = jnp.broadcast_to(False if around is None else around, (params["length"],))
    last, each = jax.lax.scan(
        body,
        list(first),
        [steps, *slices],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*last, *each]


def _cond(params: Mapping[str, Any], args: Sequence[Any], run: Evaluate) -> list[Any]:
    index, *operands = args

    def branch(program: Any) -> Callable[..., list[Any]]:
        return lambda *operands: run(program, operands)

    return list(jax.lax.switch(index, [branch(p) for p in params["branches"]], *operands))


def _while(params: Mapping[str, Any], args: Sequence[Any], run: Evaluate) -> list[Any]:
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body, carry = args[:first], args[first : first + second], args[first + second :]

    def holds(carried: Any) -> Any:
        return run(params["cond_jaxpr"], [*of_cond, *carried])[0]

    def body(carried: Any) -> Any:
        return run(params["body_jaxpr"], [*of_body, *carried])

    return list(jax.lax.while_loop(holds, body, list(carry)))


def _remat(params: Mapping[str, Any], args: Sequence[Any], run: Evaluate) -> list[Any]:
    recomputed = jax.checkpoint(
        lambda *args: run(params["jaxpr"], args),
        prevent_cse=params["prevent_cse"],
        policy=params["policy"],
    )
    return list(recomputed(*args))


_REBIND: dict[Any, Callable[..., list[Any]]] = {
    _jax.JIT: _call,
    _jax.SCAN: _scan,
    _jax.COND: _cond,
    _jax.WHILE: _while,
    _jax.REMAT: _remat,
}


# ------------------------------------------------------------------- what custom rules close over


def closes_over_watched(function: str) -> ValueError:
    """The error for an array that a custom derivative closes over, and a tape watches."""
    return ValueError(
        f"the custom derivative of {function} closes over an array that a tape watches: its rule "
        "cannot tell the derivative with respect to it. Pass the array as an argument"
    )


def refusing_derivatives(fun: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The same function. To differentiate what a `jax.custom_jvp` in it closes over is an error,
    where JAX takes zero in silence."""

    def run(*operands: Any) -> list[Any]:
        program = jax.make_jaxpr(fun)(*map(jax.typeof, operands))
        return run_graph(import_program(program), operands)

    return run


def refused_arrays(
    primitive: Any, params: Mapping[str, Any], captured: Sequence[Any]
) -> dict[int, str]:
    """Those of the arrays that an operation closes over to which a custom derivative is blind: by
    identity the name of the function that has the derivative."""
    refused: dict[int, str] = {}
    ids = set(map(id, captured))
    if ids and not _jax.facts_below(params).primitives.isdisjoint(RULES):
        _look(primitive, params, [], ids, refused)
    return refused


_Ids = frozenset[int]
_NONE: _Ids = frozenset()


def _look(
    primitive: Any,
    params: Mapping[str, Any],
    operands: Sequence[_Ids],
    ids: set[int],
    refused: dict[int, str],
) -> _Ids:
    """Follows arrays to the operations with rules; returns which of them flow to the results."""
    flowing = frozenset().union(*operands) if operands else frozenset()
    if primitive in RULES:
        facts = _jax.facts_below(params)
        found = ids.intersection(map(id, (*facts.arrays, *facts.numpy_arrays)))
        found.update(*operands[: _jax.count_closed_over(params)])
        name = _jax.traced_from(params["call_jaxpr"]).name
        refused.update(dict.fromkeys(found, name))
        return flowing
    for _, program in _jax.sub_programs(params):
        open_form, constants = _jax.parts_of(program)
        at: dict[Any, _Ids] = {
            v: frozenset(ids.intersection([id(c)])) for v, c in zip(open_form.constvars, constants)
        }
        exact = primitive is _jax.JIT and len(operands) == len(open_form.invars)
        at.update(zip(open_form.invars, operands if exact else [flowing] * len(open_form.invars)))
        for equation in open_form.eqns:
            inner = [_NONE if hasattr(v, "val") else at.get(v, _NONE) for v in equation.invars]
            result = _look(equation.primitive, equation.params, inner, ids, refused)
            at.update(dict.fromkeys(equation.outvars, result))
            flowing |= result
    return flowing
