"""Caches of computations: by the parameters of an operation, or by its programs.

A hit saves compiling the operation and its pull-backs. The key of a function with a custom rule is
the identity of its program, never equal equations: the rule is a Python function, which may compute
anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad._jax.caches import Cache, WeakCache
from tracegrad.ir.program_keys import params_key
from tracegrad.rewriting.host_calls import TO_HOST
from tracegrad.tape.computations import Computation, compiled
from tracegrad.tape.programs import RULES, refused_arrays, run_program

_JIT = _jax.JIT

# Keyed by the parameters of an operation; programs among these are compared by their structure.
_computations: Cache[Any, Computation] = Cache(2048)
# The same for programs that hold arrays: new arrays in each step may take much memory.
_holding_arrays: Cache[Any, Computation] = Cache(32)
# Keyed by the first program of an operation, while JAX keeps that program; then by the other
# parameters of the operation.
_of_programs: WeakCache[dict[Any, Computation]] = WeakCache(2048)

# A jitted function of at most this many cheap operations is computed again for its derivative:
# that costs no more than passing residuals from one program to the next.
_MAX_RECOMPUTED = 32
_COSTLY = frozenset(
    {"conv_general_dilated", "ragged_dot", "ragged_dot_general", "cholesky", "lu", "qr", "eigh"}
    | {"svd", "eig", "triangular_solve", "sort", "fft", "custom_linear_solve", "pallas_call"}
)
_RUN_ONCE = frozenset({_jax.SCAN, _jax.COND, _jax.REMAT, TO_HOST, *_jax.WHILES})


def computation_of(primitive: Any, params: Mapping[str, Any]) -> Computation:
    """Returns the cached computation of an operation without programs."""
    values = tuple(params.values())
    key = primitive, tuple(params), values, tuple(map(type, values))  # 1 == 1.0 == True
    try:
        known = _computations.get(key)
    except TypeError:  # a parameter without a hash
        return _new_computation(primitive, params)
    if known is None:
        known = _new_computation(primitive, params)
        if float not in key[3]:  # 0.0 == -0.0: no key tells them apart
            _computations.put(key, known)
    return known


def _new_computation(primitive: Any, params: Mapping[str, Any]) -> Computation:
    def fun(*operands: Any) -> list[Any]:
        return _jax.bind(primitive, operands, params)

    is_kept = _jax.runs_compiled(primitive)
    return Computation(
        fun,
        str(primitive.name),
        compiled(fun, str(primitive.name)) if is_kept else fun,
        primitive=primitive,
        params=params,
        saves=primitive.name in _COSTLY and primitive.name != "sort",
        is_kept=is_kept,
        has_rules=_has_rule(primitive),
    )


def _has_rule(primitive: Any) -> bool:
    return primitive in RULES or primitive.name == _jax.OBJECT_PRIMITIVE


def find_simple_call(params: Mapping[str, Any]) -> Computation | None:
    """Returns the cached computation of a call of a jitted function, if any; None if the function
    closes over arrays or has effects."""
    known = _of_programs.get(params["jaxpr"])
    call = None if known is None else known.get((_JIT, _jax.jit_settings(params), ()))
    return call if call is not None and call.is_simple else None


def computation_of_rule(primitive: Any, params: Mapping[str, Any]) -> Computation:
    """Returns a new computation for each call: the rule is a Python function, which may read values
    that change between calls."""
    return _new_computation_with_programs(
        primitive, params, (), _jax.facts_below(params), is_kept=False
    )


def computation_with_programs(
    primitive: Any, params: Mapping[str, Any], captured: Sequence[Any], facts: _jax.ProgramFacts
) -> Computation:
    """Returns the cached computation of an operation with programs.

    Args:
      primitive, params: the primitive and the parameters of the JAX operation.
      captured: the arrays that the programs close over and that become operands.
      facts: the facts of its programs.
    """
    ids = tuple(map(id, captured))
    if primitive is _JIT:
        program: Any = params["jaxpr"]
        key: Any = primitive, _jax.jit_settings(params), ids
    else:
        (_, program), *others = _jax.sub_programs(params)
        rest = {k: tuple(v) if type(v) is list else v for k, v in params.items()}
        for name, _ in _jax.sub_programs(params):  # such as "branches[0]" of "branches"
            rest.pop(name.split("[")[0].split(".")[0], None)
        # A weak reference never equals a later reference to another program; an id may.
        refs = tuple([(name, weakref.ref(other)) for name, other in others])
        key = primitive, tuple(rest.items()), ids, refs
    by_params = _of_programs.get(program)
    if by_params is None:
        by_params = _of_programs.put(program, {})
    try:
        computation = by_params.get(key)
    except TypeError:  # a parameter without a hash
        return _new_computation_with_programs(primitive, params, captured, facts)
    if computation is None:
        computation = _find_equal_computation(primitive, params, captured, facts)
        if not any(map(_jax.is_tracer, captured)):  # a tracer does not come again
            _drop_freed(by_params)
            by_params[key] = computation
    elif not computation.is_kept:  # this is its second call: compile it
        computation.is_kept = True
        computation.derived.clear()
    return computation


def _drop_freed(by_params: dict[Any, Computation]) -> None:
    """Drops the computations whose second or later program JAX has freed."""
    for key in list(by_params):
        if any(ref() is None for refs in key[3:] for _, ref in refs):
            by_params.pop(key, None)


def _find_equal_computation(
    primitive: Any, params: Mapping[str, Any], captured: Sequence[Any], facts: _jax.ProgramFacts
) -> Computation:
    """Returns the computation of an equal operation from before, or a new computation.

    At each call, JAX traces again the programs of `jax.lax.map`, of `jax.grad` of a loop or branch,
    and of a linear solver, and the bodies of loops that are written in place.
    """
    if captured or not facts.primitives.isdisjoint(RULES):
        is_kept = bool(captured) or primitive is not _jax.REMAT
        return _new_computation_with_programs(primitive, params, captured, facts, is_kept)
    # An outline is quickly found: the name, the number of operations, their primitives. Only from
    # the second operation of an outline on are whole programs compared.
    outline = primitive, params.get("name"), facts.operations, facts.primitives
    table = _holding_arrays if facts.arrays else _computations
    first = table.get(outline)
    if first is None:
        return table.put(outline, _new_computation_with_programs(primitive, params, (), facts))
    key = primitive, params_key(without_donation(params))
    if key == (primitive, params_key(first.params)):
        return first
    known = table.get(key)
    if known is not None:
        return known
    return table.put(key, _new_computation_with_programs(primitive, params, (), facts))


def _new_computation_with_programs(
    primitive: Any,
    params: Mapping[str, Any],
    captured: Sequence[Any],
    facts: _jax.ProgramFacts,
    is_kept: bool = True,
) -> Computation:
    """`is_kept`: whether later calls find the computation; if not, nothing is compiled for it."""
    programs = _jax.sub_programs(params)
    refused: dict[int, str] = {}
    for _, program in programs if captured else ():
        refused.update(refused_arrays(program, captured))
    captured = [array for array in captured if id(array) not in refused]
    ids = list(map(id, captured))
    # A weak cache finds the computation by its program, so the computation must not refer to it.
    copies = {name: program.replace() for name, program in programs}
    params = _jax.with_programs(without_donation(params), copies)
    is_edited = bool(ids) or TO_HOST in facts.primitives or facts.closes_over
    is_edited |= facts.has_effects and _jax.SCAN in (primitive, *facts.primitives)
    is_edited |= primitive is _jax.CUSTOM_JVP and _jax.count_closed_over(params) > 0

    def fun(*operands: Any) -> list[Any]:
        args = operands[len(ids) :]
        if not is_edited:
            return _jax.bind(primitive, args, params)
        program = _jax.program_of_one(primitive, params, list(map(jax.typeof, args)))
        return run_program(program, args, dict(zip(ids, operands)))

    def inlined(*operands: Any) -> list[Any]:
        args = operands[len(ids) :]
        if not is_edited:
            return _jax.eval_program(params["jaxpr"], args)
        return run_program(params["jaxpr"], args, dict(zip(ids, operands)))

    name = str(params.get("name", primitive.name))
    run = inlined if primitive is _JIT and _jax.is_plain_jit(params) else fun
    runs_compiled = run is inlined or primitive in (_jax.SCAN, _jax.COND, _jax.WHILE)
    below = (primitive, *facts.primitives)
    calls_host = _jax.calls_host(p.name for p in facts.primitives)
    is_run_once = calls_host or not _RUN_ONCE.isdisjoint(below)
    return Computation(
        fun,
        name,
        compiled(run, name) if runs_compiled else fun,
        primitive=primitive,
        params=params,
        captured=captured,
        refused=refused,
        saves=not facts.has_references and (is_run_once or _is_costly(facts)),
        is_run_once=is_run_once and not facts.has_references,
        has_rules=any(map(_has_rule, below)),
        has_nones=primitive is not _jax.CUSTOM_VJP and _jax.CUSTOM_VJP in below,
        has_effects=facts.has_effects and calls_host,
        has_references=facts.has_references,
        is_simple=not captured and not facts.has_effects,
        is_kept=is_kept,
    )


def _is_costly(facts: Any) -> bool:
    """Whether computing an operation again costs more than saving residuals."""
    if facts.operations > _MAX_RECOMPUTED or facts.has_effects:
        return True
    names = {p.name for p in facts.primitives}
    is_more = facts.operations > 1  # the derivative of a product alone does not need its result
    return not _COSTLY.isdisjoint(names) or (is_more and "dot_general" in names)


def without_donation(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns parameters that donate no argument, since the tape still needs the arguments."""
    donated = params.get("donated_invars", ())
    if any(donated):
        return {**params, "donated_invars": (False,) * len(donated)}
    return params
