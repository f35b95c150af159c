"""Builds, edits, binds and classifies JAX's programs (jaxprs) and their sub-programs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import primitives

from tracegrad._jax.arrays import struct
from tracegrad._jax.compat import (
    PROGRAM_TYPES,
    effects_of,
    opened,
    parts_of,
    shard_map_like,
)
from tracegrad._jax.traces import in_a_new_thread

JIT = primitives.jit_p
REMAT = primitives.remat_p
SCAN = primitives.scan_p
COND = primitives.cond_p
WHILE = primitives.while_p
STOP_GRADIENT = primitives.stop_gradient_p
CHECKPOINTED_WHILE: Any = jex.Primitive("checkpointed_while")
"""JAX's `while` with two more parameters: `checkpoints`, the number of states to keep, and `place`,
its name in messages. Its rules are in `rewriting.loop_primitive`."""
WHILES: tuple[Any, ...] = (WHILE, CHECKPOINTED_WHILE)
CUSTOM_JVP = primitives.custom_jvp_call_p
CUSTOM_VJP = primitives.custom_vjp_call_p


# Only the lowering of these primitives uses their sub-programs (grids, references), or the
# sub-program repeats the name (the sum of "scatter-add"). A node of such a primitive is one
# operation, without regions. (`programs_in` knows an exception.)
OPAQUE_PRIMITIVES = frozenset(
    {
        *("pallas_call", "call_hi_primitive", "core_map", "mpmd_map"),
        *("scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
    }
)


# A primitive (`jax.lax.custom_root` in JAX >= 0.12) whose parameter is an object with programs and
# derivatives. `programs_in` finds these programs.
OBJECT_PRIMITIVE = "call_hi_primitive"


# Calls that have a batching or transposition rule of the user's: maps the name of the primitive to
# the parameter that has the called program.
CALLS_WITH_RULES = {"custom_vmap_call": "call", "linear_call": "callee"}


# These primitives bind an open program, without constants: closed-over values must be operands.
OPEN_PROGRAM_PRIMITIVES = frozenset({"remat2", "checkpoint", "shard_map"})


def calls_host(primitives: Iterable[str]) -> bool:
    """Whether a primitive of these names runs code that XLA did not compile.

    Effects are no test: `jax.pure_callback` and `jax.ffi.ffi_call` have none. ``check``, the
    primitive of checkify, raises from the host if it is lowered.
    """
    return any("callback" in name or name in _HOST_PRIMITIVES for name in primitives)


_HOST_PRIMITIVES = frozenset({"debug_print", "ffi_call", "check"})


def _trace_sample_equations() -> Sequence[Any]:
    def program(x: Any) -> Any:
        jax.debug.callback(lambda: None)
        jax.lax.axis_index("a")
        return jax.jit(lambda x: x)(x)

    with jax.disable_jit(False):
        made = jax.make_jaxpr(program, axis_env=[("a", 1)])(struct((), np.float32))
    return made.eqns


# The equations of three calls, in one trace, because a trace takes a millisecond.
_DEBUGGING, _AXIS, _JIT_CALL = in_a_new_thread(_trace_sample_equations)
_DEBUG_EFFECTS = frozenset(_DEBUGGING.effects)
(_AXIS_EFFECT,) = map(type, _AXIS.effects)


def may_be_repeated(effect: Any) -> bool:
    """Whether an effect may be repeated or dropped: it is the effect of an unordered
    `jax.debug.callback` (or print), or of a collective, which only names an axis."""
    return effect in _DEBUG_EFFECTS or is_collective(effect)


def is_collective(effect: Any) -> bool:
    """Whether an effect only names an axis."""
    return isinstance(effect, _AXIS_EFFECT)


def program_of(
    like: Any,
    *,
    constants: Mapping[Any, Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    equations: Sequence[Any],
) -> Any:
    """Returns a program with these parts, closed or open like `like`.

    The equations give the effects. An effect on an input reference names its position among the
    constants and inputs; an effect on a reference that the program makes itself is dropped.
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
    if PROGRAM_TYPES[0] is PROGRAM_TYPES[1]:  # newer JAX has one class, open and closed
        return open_form.replace(**parts, consts=arrays)
    new = open_form.replace(**parts)
    return new if like is open_form else like.replace(jaxpr=new, consts=arrays)


def program_of_one(primitive: Any, params: Mapping[str, Any], args: Sequence[Any]) -> Any:
    """The program of one operation. `args`: operands, or their types."""
    return jax.make_jaxpr(lambda *operands: bind(primitive, operands, params))(*args)


def with_inputs(program: Any, avals: Sequence[Any], places: Mapping[int, int]) -> Any:
    """Makes some constants of a program new inputs, after the program's own inputs.

    `avals`: the types of the new inputs. `places`: by the id of a constant, the index of its input;
    other constants stay.
    """
    open_form, constants = parts_of(program)
    kept: dict[Any, Any] = {}
    new: dict[int, Any] = {}
    same: dict[Any, Any] = {}  # maps further constants of one place to the first one
    for var, constant in zip(open_form.constvars, constants, strict=True):
        place = places.get(id(constant))
        if place is None:
            kept[var] = constant
        elif new.setdefault(place, var) is not var:
            same[var] = new[place]

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [a if isinstance(a, jex.Literal) else same.get(a, a) for a in atoms]

    inputs = [new[i] if i in new else jex.Var(aval) for i, aval in enumerate(avals)]
    return program_of(
        program,
        constants=kept,
        inputs=[*open_form.invars, *inputs],
        outputs=read(open_form.outvars),
        equations=[e.replace(invars=read(e.invars)) if same else e for e in open_form.eqns],
    )


def sub_programs(params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns (name of the region, sub-program) for the sub-programs in a primitive's parameters.

    The name is ``jaxpr`` for a parameter, ``branches[0]`` for an item of a sequence, and
    ``jaxprs.solve`` for a field of a named tuple.
    """
    found = []
    for key, value in params.items():
        if key == "static" and "treedef" in params:
            # The static arguments of equinox's primitives (lineax's `linear_solve`) hold programs,
            # whose constants belong to other traces. The constants of this trace are operands of
            # the primitive already.
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
    """Replaces sub-programs in a primitive's parameters. `programs`: by the names of
    `sub_programs`."""
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
    """Returns (name, program) for the programs of an operation that have a meaning outside of its
    lowering: its `sub_programs`, or the programs in the object of the `OBJECT_PRIMITIVE`."""
    if primitive.name == OBJECT_PRIMITIVE:
        kept = vars(params["_prim"])
        return [(name, value) for name, value in kept.items() if isinstance(value, PROGRAM_TYPES)]
    return [] if primitive.name in OPAQUE_PRIMITIVES else sub_programs(params)


def bind(primitive: Any, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Binds one primitive; always returns a list."""
    try:
        out = primitive.bind(*args, **primitive.get_bind_params(dict(params)))
    except Exception as error:
        raise public_error(error)  # noqa: B904 (the same error)
    return list(out) if primitive.multiple_results else [out]


def public_error(error: Exception) -> Exception:
    """Turns JAX's internal error for a NaN in a jitted call (`jax_debug_nans`) into a
    FloatingPointError, as `jax.jit` does."""
    if type(error).__name__ != "InternalFloatingPointError":
        return error
    name, what = error.args[:2]
    public = FloatingPointError(f"invalid value ({what}) encountered in {name}")
    public.__suppress_context__ = True
    return public


@contextmanager
def standing_for(source_info: Any) -> Iterator[None]:
    """A block whose operations have the scope and source line of an equation, instead of the
    current scope and line."""
    with source_info_util.user_context(source_info.traceback, name_stack=source_info.name_stack):
        yield


@contextmanager
def at_own_lines() -> Iterator[None]:
    """A block whose operations keep their own source lines, despite an enclosing `standing_for`."""
    with source_info_util.user_context(None, name_stack=source_info_util.current_name_stack()):
        yield


def weak_as(array: Any, aval: Any) -> Any:
    """Makes the type of an array weak if `aval` is weak, else strong."""
    if jax.typeof(array).weak_type == aval.weak_type:
        return array
    convert: Any = primitives.convert_element_type_p
    return convert.bind(array, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None)


def wider_jit(params: Mapping[str, Any], operands: int, results: int) -> dict[str, Any]:
    """Returns the parameters of a jitted call with this many more operands and results, which have
    no sharding, layout or donation."""
    unspecified = _JIT_CALL.params["in_shardings"][0]
    more = {
        "donated_invars": (False,) * operands,
        "in_layouts": (None,) * operands,
        "in_shardings": (unspecified,) * operands,
        "out_layouts": (None,) * results,
        "out_shardings": (unspecified,) * results,
    }
    return {**params, **{name: (*params[name], *added) for name, added in more.items()}}


def equation_context(source_info: Any, settings: Any) -> tuple[AbstractContextManager[None], ...]:
    """Returns two context managers: an operation inside both has the source line, the settings and
    the scope of an equation; the scope is nested in the current scope.

    `settings`: None keeps the current settings (for an operation that a tape has recorded).
    """
    stack = source_info_util.current_name_stack() + source_info.name_stack
    scope = source_info_util.user_context(source_info.traceback, name_stack=stack)
    return scope, nullcontext() if settings is None else settings.manager


def in_mesh_of(shard_map: Mapping[str, Any], run: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls `run` while JAX traces a `jax.shard_map` with these parameters,
    in which axis names are defined, and types say over which axes values vary."""

    def body() -> list[Any]:
        run()
        return []

    mapped = shard_map_like(shard_map, body, in_specs=(), out_specs=())

    def run_inside() -> None:
        jax.make_jaxpr(lambda: mapped())()

    return run_inside


def abstract_eval(
    primitive: Any, avals: Sequence[Any], params: Mapping[str, Any]
) -> list[Any] | None:
    """The result types of a primitive by JAX's typing rule; None if there is no rule."""
    try:
        out = primitive.abstract_eval(*avals, **params)
    except NotImplementedError:
        return None
    types = out[0] if isinstance(out, tuple) and len(out) == 2 else out
    return list(types) if primitive.multiple_results else [types]


# The parameters of a call of `jax.jit` without options, except the program.
_PLAIN_JIT = {name: value for name, value in _JIT_CALL.params.items() if name != "jaxpr"}

# The parameters of a jitted call, except the program.
jit_settings: Callable[[Mapping[str, Any]], tuple[Any, ...]] = operator.itemgetter(*_PLAIN_JIT)

# These parameters do not affect the results of a program.
_RESULT_NEUTRAL = frozenset({"name", "inline", "keep_unused", "donated_invars"})


def is_plain_jit(params: Mapping[str, Any]) -> bool:
    """Whether a jitted call has no shardings, layouts, meshes or compiler options, so that
    `jax.jit` of its program makes the same call."""
    for name, usual in _PLAIN_JIT.items():
        value = params[name]
        if name in _RESULT_NEUTRAL or value == usual:
            continue
        if not isinstance(value, tuple) or not usual or any(v != usual[0] for v in value):
            return False
    return True


def runs_compiled(primitive: Any) -> bool:
    """Whether JAX, outside of all transformations, compiles a program of this primitive alone."""
    usual = getattr(primitives.mul_p.impl, "func", None)
    return usual is not None and getattr(primitive.impl, "func", None) is usual
