"""JAX's programs (jaxprs): their parts, how they run and what they call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import primitives

from tracegrad._jax.arrays import is_tracer, struct
from tracegrad._jax.compat import (
    INLINED_WHEN_LOWERED,
    PROGRAM_TYPES,
    constants_of,
    effects_of,
    opened,
    parts_of,
)
from tracegrad._jax.traces import in_a_new_thread

JIT = primitives.jit_p
REMAT = primitives.remat_p
SCAN = primitives.scan_p
COND = primitives.cond_p
WHILE = primitives.while_p
STOP_GRADIENT = primitives.stop_gradient_p
CHECKPOINTED_WHILE: Any = jex.Primitive("checkpointed_while")
"""JAX's `while` with two more parameters: `checkpoints`, how many states are kept, and `place`, how
messages call it. Its rules are in `rewriting.loop_primitive`."""
WHILES: tuple[Any, ...] = (WHILE, CHECKPOINTED_WHILE)
CUSTOM_JVP = primitives.custom_jvp_call_p
CUSTOM_VJP = primitives.custom_vjp_call_p


# Their sub-programs are laid out for their own lowering (grids, references), and mean nothing
# outside it, or say again what their names say: such a node is one operation to us.
OPAQUE_PRIMITIVES = frozenset(
    {
        *("pallas_call", "call_hi_primitive", "core_map", "mpmd_map"),
        *("scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
    }
)


# An operation that has what it runs, and its derivatives, in an object of JAX's: since 0.12
# `jax.lax.custom_root`.
OF_AN_OBJECT = "call_hi_primitive"


# Calls of one program, by its parameter, which JAX maps or transposes by a function of the user's.
CALLS_WITH_RULES = {"custom_vmap_call": "call", "linear_call": "callee"}


# These bind a program without constants of its own: what it closes over must be an operand.
OPEN_PROGRAM_PRIMITIVES = frozenset({"remat2", "checkpoint", "shard_map"})


def calls_host(primitive: str) -> bool:
    """Whether the primitive of this name runs code that XLA did not compile.

    Effects do not tell: `jax.pure_callback` and `jax.ffi.ffi_call` have none. ``check`` is that of
    checkify, which raises from the host where JAX was told to lower it.
    """
    return "callback" in primitive or primitive in ("debug_print", "ffi_call", "check")


def _equations() -> Sequence[Any]:
    def program(x: Any) -> Any:
        jax.debug.callback(lambda: None)
        jax.lax.axis_index("a")
        return jax.jit(lambda x: x)(x)

    with jax.disable_jit(False):
        made = jax.make_jaxpr(program, axis_env=[("a", 1)])(struct((), np.float32))
    return made.eqns


# What JAX makes of these three, found out in one program since that takes a millisecond.
_DEBUGGING, _AXIS, _CALL = in_a_new_thread(_equations)
_OF_DEBUGGING = frozenset(_DEBUGGING.effects)
(_OF_AXES,) = map(type, _AXIS.effects)


def may_be_repeated(effect: Any) -> bool:
    """Whether an effect may happen more often, or never: that of `jax.debug.callback` and its like
    where they have no order, and that of a collective, which is the name of an axis."""
    return effect in _OF_DEBUGGING or is_collective(effect)


def is_collective(effect: Any) -> bool:
    """Whether an effect is that of computing with what lies along an axis of others."""
    return isinstance(effect, _OF_AXES)


def program_of(
    like: Any,
    *,
    constants: Mapping[Any, Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    equations: Sequence[Any],
) -> Any:
    """A program of other parts, in the form of another one (closed or open).

    An effect on a reference says which input that is, so it is counted anew; that on a reference
    which is made inside goes.
    """
    open_form = opened(like)
    variables = [*constants, *inputs]
    effects = effects_of(equations, {v: i for i, v in enumerate(variables)})
    info = open_form.debug_info
    if (len(inputs), len(outputs)) != (len(open_form.invars), len(open_form.outvars)):
        info = info._replace(arg_names=None, result_paths=None)
    parts: dict[str, Any] = {
        "constvars": list(constants),
        "invars": list(inputs),
        "outvars": list(outputs),
        "eqns": list(equations),
        "effects": effects,
        "debug_info": info,
    }
    arrays = list(constants.values())
    if PROGRAM_TYPES[0] is PROGRAM_TYPES[1]:
        return open_form.replace(**parts, consts=arrays)
    new = open_form.replace(**parts)
    return new if like is open_form else like.replace(jaxpr=new, consts=arrays)


def program_of_one(primitive: Any, params: Mapping[str, Any], args: Sequence[Any]) -> Any:
    """The program of one operation on operands like these."""
    return jax.make_jaxpr(lambda *operands: bind(primitive, operands, params))(*args)


def with_inputs(program: Any, avals: Sequence[Any], places: Sequence[int | None]) -> Any:
    """The program with new inputs of these types behind its own, which some of its constants are.

    `places`: which of the new inputs each constant is; None for one that stays.
    """
    open_form, constants = parts_of(program)
    new = [jex.Var(aval) for aval in avals]
    placed = list(zip(open_form.constvars, constants, places, strict=True))
    kept = [(var, constant) for var, constant, place in placed if place is None]
    now = {var: new[place] for var, _, place in placed if place is not None}

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [a if isinstance(a, jex.Literal) else now.get(a, a) for a in atoms]

    open_form = open_form.replace(
        constvars=[var for var, _ in kept],
        invars=[*open_form.invars, *new],
        outvars=read(open_form.outvars),
        eqns=[eqn.replace(invars=read(eqn.invars)) for eqn in open_form.eqns],
    )
    return program.replace(jaxpr=open_form, consts=[constant for _, constant in kept])


def sub_programs(params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The sub-programs among a primitive's parameters, by the names of their regions.

    ``jaxpr`` for one that is a parameter, ``branches[0]`` for one in a sequence,
    ``jaxprs.solve`` for one in a named tuple.
    """
    found = []
    for key, value in params.items():
        if key == "static" and "treedef" in params:
            # An operation of equinox's, as lineax's `linear_solve`: what is no array among its
            # arguments. The constants of a program there are operands, and those that it names are
            # of another trace, or unknown.
            continue
        if isinstance(value, PROGRAM_TYPES):
            found.append((key, value))
        elif isinstance(value, (tuple, list)):
            fields = getattr(value, "_fields", None)
            for i, item in enumerate(value):
                if isinstance(item, PROGRAM_TYPES):
                    found.append((f"{key}.{fields[i]}" if fields else f"{key}[{i}]", item))
    return found


def with_programs(params: Mapping[str, Any], programs: Mapping[str, Any]) -> dict[str, Any]:
    """A primitive's parameters with other sub-programs, by the names of `sub_programs`."""
    new = dict(params)
    for key, value in params.items():
        if key in programs:
            new[key] = programs[key]
        elif isinstance(value, (tuple, list)):
            fields = getattr(value, "_fields", None)
            items = [
                programs.get(f"{key}.{fields[i]}" if fields else f"{key}[{i}]", item)
                for i, item in enumerate(value)
            ]
            new[key] = type(value)(*items) if fields else type(value)(items)
    return new


def programs_in(primitive: Any, params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The programs of an operation that mean something outside of its own lowering: its
    `sub_programs`, or what the object of an `OF_AN_OBJECT` keeps, by name."""
    if primitive.name == OF_AN_OBJECT:
        kept = vars(params["_prim"])
        return [(name, value) for name, value in kept.items() if isinstance(value, PROGRAM_TYPES)]
    return [] if primitive.name in OPAQUE_PRIMITIVES else sub_programs(params)


def eval_program(program: Any, args: Sequence[Any]) -> list[Any]:
    """Binds every equation of a program as it was: same parameters, scopes and source lines."""
    return list(jax.core.eval_jaxpr(*parts_of(program), *args))


def bind(primitive: Any, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Binds one primitive; the results are always a list."""
    out = primitive.bind(*args, **primitive.get_bind_params(dict(params)))
    return list(out) if primitive.multiple_results else [out]


@contextmanager
def standing_for(source_info: Any) -> Iterator[None]:
    """A block: operations bound in it have the scope and the source line of an equation."""
    with source_info_util.user_context(source_info.traceback, name_stack=source_info.name_stack):
        yield


@contextmanager
def outside_of_scopes() -> Iterator[None]:
    """A block: operations bound in it have their own scopes alone, and their own source lines."""
    with source_info_util.user_context(None, name_stack=source_info_util.new_name_stack()):
        yield


def weak_as(array: Any, aval: Any) -> Any:
    """The array with a weak type if `aval` is weak, and with a strong one if not."""
    if jax.typeof(array).weak_type == aval.weak_type:
        return array
    convert: Any = primitives.convert_element_type_p
    return convert.bind(array, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None)


def call_program(program: Any, args: Sequence[Any], name: str) -> list[Any]:
    """Binds a closed program as one call, which JAX writes out when it lowers what that is in.
    Nothing in the program is bound again, as `eval_program` does: JAX before 0.12, which cannot
    write out a call so late, does that here too."""
    if INLINED_WHEN_LOWERED is None:
        return eval_program(program, args)
    parts = opened(program)
    constants = dict(zip(parts.constvars, constants_of(program), strict=True))
    # JAX differentiates the operands of a call alone.
    tracers = {v: array for v, array in constants.items() if is_tracer(array)}
    if tracers:
        program = program_of(
            program,
            constants={v: array for v, array in constants.items() if v not in tracers},
            inputs=[*tracers, *parts.invars],
            outputs=parts.outvars,
            equations=parts.eqns,
        )
    with_mesh = jax.make_jaxpr(lambda: jax.jit(lambda: ())())()  # the mesh around is a parameter
    operands = [*tracers.values(), *args]
    params = wider_jit(with_mesh.eqns[0].params, len(operands), len(parts.outvars))
    params |= {"jaxpr": program, "name": name, "inline": INLINED_WHEN_LOWERED}
    results = bind(JIT, operands, params)
    given = dict(zip(parts.invars, args, strict=True))  # which jit hands on as they are
    pairs = zip(parts.outvars, results, strict=True)
    return [x if isinstance(v, jex.Literal) else given.get(v, x) for v, x in pairs]


def wider_jit(params: Mapping[str, Any], operands: int, results: int) -> dict[str, Any]:
    """The parameters of a jitted call with more operands and results. The new ones have no sharding
    and no layout, and are not donated."""
    unsaid = _CALL.params["in_shardings"][0]
    more = {
        "donated_invars": (False,) * operands,
        "in_layouts": (None,) * operands,
        "in_shardings": (unsaid,) * operands,
        "out_layouts": (None,) * results,
        "out_shardings": (unsaid,) * results,
    }
    return {**params, **{name: (*params[name], *own) for name, own in more.items()}}


def equation_context(source_info: Any, settings: Any) -> tuple[AbstractContextManager[None], ...]:
    """Two blocks: what is bound inside both is so under the scope and source line of an equation,
    and under its settings.

    `settings` is None for what was recorded as it ran: the settings are those around it then.
    """
    stack = source_info_util.current_name_stack() + source_info.name_stack
    scope = source_info_util.user_context(source_info.traceback, name_stack=stack)
    return scope, nullcontext() if settings is None else settings.manager


def abstract_eval(
    primitive: Any, avals: Sequence[Any], params: Mapping[str, Any]
) -> list[Any] | None:
    """The result types of a primitive by JAX's own typing rule; None where it has none."""
    try:
        out = primitive.abstract_eval(*avals, **params)
    except NotImplementedError:
        return None
    types = out[0] if isinstance(out, tuple) and len(out) == 2 else out
    return list(types) if primitive.multiple_results else [types]


# What belongs to a call of `jax.jit` without options, but for the program.
_PLAIN_JIT = {name: value for name, value in _CALL.params.items() if name != "jaxpr"}

# Takes out of the parameters of a jitted call all but the program.
jit_settings: Callable[[Mapping[str, Any]], tuple[Any, ...]] = operator.itemgetter(*_PLAIN_JIT)

# These change nothing about what a program computes from its arguments.
_ANY = frozenset({"name", "inline", "keep_unused", "donated_invars"})


def is_plain_jit(params: Mapping[str, Any]) -> bool:
    """Whether a jitted function around the program of such a call is called as this one is: there
    are no shardings, layouts, meshes or options of the compiler."""
    for name, usual in _PLAIN_JIT.items():
        value = params[name]
        if name in _ANY or value == usual:
            continue
        if not isinstance(value, tuple) or not usual or any(v != usual[0] for v in value):
            return False
    return True


def runs_compiled(primitive: Any) -> bool:
    """Whether JAX runs a primitive outside of all transformations by compiling it alone."""
    usual = getattr(primitives.mul_p.impl, "func", None)
    return usual is not None and getattr(primitive.impl, "func", None) is usual
