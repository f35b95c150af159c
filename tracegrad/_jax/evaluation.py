"""Runs programs: equation by equation, or as one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend import source_info_util

from tracegrad._jax.arrays import is_tracer
from tracegrad._jax.compat import INLINED_WHEN_LOWERED, INLINED_WHEN_TRACED, parts_of
from tracegrad._jax.programs import (
    CUSTOM_JVP,
    CUSTOM_VJP,
    JIT,
    REMAT,
    bind,
    equation_context,
    program_of,
    public_error,
    sub_programs,
    wider_jit,
    with_inputs,
)
from tracegrad._jax.traces import ReverseTrace, current_trace, staging_trace


def eval_program(program: Any, args: Sequence[Any]) -> list[Any]:
    """Binds each equation of a program with unchanged parameters, scope and source line."""
    # (Outside of all traces, JAX would compile each operation that became a call.)
    shares_calls = isinstance(current_trace(None), ReverseTrace) and staging_trace() is not None
    try:
        if shares_calls:
            return _eval_in_reverse_mode(program, args)
        return list(jax.core.eval_jaxpr(*parts_of(program), *args))
    except Exception as error:
        raise public_error(error)  # noqa: B904 (the same error)


def _eval_in_reverse_mode(program: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a program as `jax.core.eval_jaxpr` does, but faster if operations are repeated.

    JAX makes the derivative of an operation for each equation, but the derivative of a call once
    for each called program. So repeated operations become calls of one program, which JAX inlines.
    """
    open_form, constants = parts_of(program)
    values = dict(zip([*open_form.constvars, *open_form.invars], [*constants, *args], strict=True))

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [atom.val if isinstance(atom, jex.Literal) else values[atom] for atom in atoms]

    keys = [_operation_key(equation) for equation in open_form.eqns]
    counts = Counter(keys)
    calls: dict[Any, Any] = {}
    for equation, key in zip(open_form.eqns, keys, strict=True):
        primitive, params = equation.primitive, equation.params
        scope, settings = equation_context(equation.source_info, equation.ctx)
        with scope, settings:
            if key is not None and counts[key] > 2:
                if key not in calls:
                    calls[key] = _make_call(equation, program)
                primitive, params = JIT, calls[key]
            results = bind(primitive, read(equation.invars), params)
        values.update(zip(equation.outvars, results, strict=True))
    return read(open_form.outvars)


_OPENED_BY_DERIVATIVES = (REMAT, CUSTOM_JVP, CUSTOM_VJP)


def _operation_key(equation: Any) -> Any:
    """Returns a key that is equal for equations with the same operation, parameters, settings and
    types of operands. Returns None for an operation that has effects, or is a call.

    Returns None also if a derivative of the operation consists of several operations of its
    program: they would lose their lines, since JAX gives all operations of an inlined call the line
    of the call.
    """
    if equation.effects or equation.primitive is JIT:
        return None
    if equation.primitive in _OPENED_BY_DERIVATIVES:
        programs = sub_programs(equation.params)
        if sum(len(program.eqns) for _, program in programs) > 1:
            return None
    params = tuple([(name, type(value), value) for name, value in equation.params.items()])
    types = tuple([atom.aval for atom in equation.invars])
    key = equation.primitive, params, equation.ctx, types
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _make_call(equation: Any, like: Any) -> dict[str, Any]:
    """Returns the parameters of a call of an operation; JAX inlines the call while tracing."""
    inputs = [jex.Var(atom.aval) for atom in equation.invars]
    outputs = [jex.Var(var.aval) for var in equation.outvars]
    operation = equation.replace(
        invars=inputs, outvars=outputs, source_info=source_info_util.new_source_info()
    )
    program = program_of(like, constants={}, inputs=inputs, outputs=outputs, equations=[operation])
    return call_params(program, equation.primitive.name, INLINED_WHEN_TRACED)


def call_program(program: Any, args: Sequence[Any], name: str) -> list[Any]:
    """Binds a closed program as one call, which JAX inlines when it lowers the enclosing program.
    `eval_program` binds each equation; this function calls it only before JAX 0.12, which cannot
    inline a call that late, and outside of all traces, so that `jax_debug_nans` finds the operation
    that makes a NaN."""
    if INLINED_WHEN_LOWERED is None or staging_trace() is None:
        return eval_program(program, args)
    open_form, constants = parts_of(program)
    # JAX differentiates a call only in its operands, so constants that are tracers become operands.
    tracers = list(filter(is_tracer, constants))
    if tracers:
        places = {id(tracer): i for i, tracer in enumerate(tracers)}
        program = with_inputs(program, list(map(jax.typeof, tracers)), places)
    results = bind(JIT, [*args, *tracers], call_params(program, name, INLINED_WHEN_LOWERED))
    # If an output is an input, return the input itself, as `jax.jit` does.
    arg_of = dict(zip(open_form.invars, args, strict=True))
    pairs = zip(open_form.outvars, results, strict=True)
    return [x if isinstance(v, jex.Literal) else arg_of.get(v, x) for v, x in pairs]


def call_params(program: Any, name: str, inline: Any) -> dict[str, Any]:
    """Returns the parameters of a call of a closed program by `jax.jit` without options, except the
    option `inline`."""
    with jax.disable_jit(False):
        # The current mesh is a parameter, so trace a call now. It has an operand: JAX would run
        # another one at once inside of `jax.ensure_compile_time_eval`.
        (call,) = jax.make_jaxpr(lambda x: jax.jit(lambda x: ())(x))(0).eqns
    narrow = {k: () if isinstance(v, tuple) else v for k, v in call.params.items()}
    params = wider_jit(narrow, len(program.in_avals), len(program.out_avals))
    return {**params, "jaxpr": program, "name": name, "inline": inline}
