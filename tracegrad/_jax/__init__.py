"""What this package needs of JAX that differs between its versions or has no public documentation.

This is the only module that knows how JAX versions differ; nothing else branches on a version.
Everything here is probed by ``tests/test_jax.py`` on the oldest and on the newest supported JAX.
"""

from __future__ import annotations

import functools
import operator
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, SimpleNamespace
from typing import Any

import jax
import jax.extend.core as jex
import jaxlib.version
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import primitives
from jax.extend.mlir import deserialize_portable_artifact
from jax.interpreters import ad, batching, mlir  # noqa: TID251 (see `identity_primitive`)

VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version__.split(".")[:3])


config: Any = jax.config  # whose settings have types on newer JAX alone


def versions() -> dict[str, str]:
    """What is running, to be written down."""
    return {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__}


# One class from 0.12 on, two before.
PROGRAM_TYPES: tuple[type, ...] = (getattr(jex, "ClosedJaxpr"), jex.Jaxpr)  # noqa: B009

JIT = primitives.jit_p
REMAT = primitives.remat_p
SCAN = primitives.scan_p
COND = primitives.cond_p
WHILE = primitives.while_p
STOP_GRADIENT = primitives.stop_gradient_p
CUSTOM_JVP = primitives.custom_jvp_call_p
CUSTOM_VJP = primitives.custom_vjp_call_p

# Their sub-programs are laid out for their own lowering (grids, references), and mean nothing
# outside it: such a node is one operation to us.
OPAQUE_PRIMITIVES = frozenset({"pallas_call", "call_hi_primitive", "core_map", "mpmd_map"})

# These bind a program without constants of its own: what it closes over must be an operand.
OPEN_PROGRAM_PRIMITIVES = frozenset({"remat2", "checkpoint", "shard_map"})


def calls_host(primitive: str) -> bool:
    """Whether the primitive of this name runs code that XLA did not compile.

    Effects do not tell: `jax.pure_callback` and `jax.ffi.ffi_call` have none. ``check`` is that of
    checkify, which raises from the host where JAX was told to lower it.
    """
    return "callback" in primitive or primitive in ("debug_print", "ffi_call", "check")


# ------------------------------------------------------------------------------------- programs


def is_program(value: object) -> bool:
    """Whether a parameter of a primitive is a sub-program."""
    return isinstance(value, PROGRAM_TYPES)


def constants_of(program: Any) -> Sequence[Any]:
    """The values of ``program.constvars``; an open program has none."""
    return getattr(program, "consts", ())


def opened(program: Any) -> Any:
    """The open form of a program: where the two forms differ, the one that holds no values."""
    return program.jaxpr if hasattr(program, "jaxpr") else program


def eval_program(program: Any, args: Sequence[Any]) -> list[Any]:
    """Binds every equation of a program as it was: same parameters, scopes and source lines."""
    return list(jax.core.eval_jaxpr(opened(program), constants_of(program), *args))


def bind(primitive: Any, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Binds one primitive; the results are always a list."""
    out = primitive.bind(*args, **primitive.get_bind_params(dict(params)))
    return list(out) if primitive.multiple_results else [out]


@contextmanager
def equation_context(source_info: Any, settings: Any) -> Iterator[None]:
    """Binds what is inside it under the scope, source line and settings of an equation.

    `settings` is None for what was recorded as it ran: the settings are those around it then.
    """
    stack = source_info_util.current_name_stack() + source_info.name_stack
    with (
        source_info_util.user_context(source_info.traceback, name_stack=stack),
        nullcontext() if settings is None else settings.manager,
    ):
        yield


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


def has_gradient(aval: Any) -> bool:
    """Whether an array, or a type, has cotangents: the float and complex ones."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and _is_inexact(dtype)


@functools.lru_cache(256)
def _is_inexact(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


def no_cotangent(aval: Any) -> Any:
    """What JAX takes for the (co)tangent of an integer: zeros of the empty dtype ``float0``."""
    return np.zeros(aval.shape, jax.dtypes.float0)


def align(avals: Sequence[Any], flowing: Sequence[Any]) -> list[Any]:
    """One (co)tangent for every type: the given ones, and JAX's empty ones for integers."""
    rest = iter(flowing)
    return [next(rest) if has_gradient(aval) else no_cotangent(aval) for aval in avals]


def of_some(
    run: Callable[[list[Any]], Any], args: Sequence[Any], positions: Sequence[int]
) -> Callable[..., Any]:
    """``run(operands)`` as a function of the operands at some positions, to be differentiated with
    respect to these; the others are those of `args`."""

    def along(*chosen: Any) -> Any:
        operands = list(args)
        for i, value in zip(positions, chosen, strict=True):
            operands[i] = value
        return run(operands)

    return along


def type_text(aval: Any) -> str:
    """``f32[8,4]``; a leading ``~`` marks a weak type."""
    text = aval.str_short(short_dtypes=True)
    return f"~{text}" if getattr(aval, "weak_type", False) else str(text)


def struct(shape: Sequence[Any], dtype: Any, weak_type: bool = False) -> Any:
    """A `jax.ShapeDtypeStruct`, which has no types of its own in the versions that we know."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type=weak_type)  # type: ignore[no-untyped-call]


def without_devices(aval: Any) -> Any:
    """A type without the devices that its values happen to lie on; with them, where the type says
    how values are split (explicit shardings), so that programs depend on it.

    The type of an array on several devices names their mesh in either case, and what is exported
    for it runs on as many devices only.
    """
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    kinds = getattr(mesh, "axis_types", None) or ()
    if any(kind != jax.sharding.AxisType.Auto for kind in kinds):
        return aval
    return struct(aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False)))


@contextmanager
def without_folders() -> Iterator[None]:
    """Leaves the folders of source files out of programs that are lowered inside it: what is
    written to be given away does not tell where it was made, and is the same wherever that was.

    JAX's setting for that holds for the whole process; a user's own is left as it is.
    """
    name = "jax_hlo_source_file_canonicalization_regex"
    is_free = getattr(jax.config, name) is None
    if is_free:
        jax.config.update(name, r".*[/\\]")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if is_free:
            jax.config.update(name, None)  # type: ignore[no-untyped-call]


def symbolic_constraints(avals: Sequence[Any]) -> list[str]:
    """The constraints that a user put on the symbolic dimensions of types: ``b >= 4``.

    `jax.export` does not write them, and has no public way to ask for them.
    """
    found: dict[str, None] = {}
    for aval in avals:
        for dimension in aval.shape:
            for constraint in getattr(
                getattr(dimension, "scope", None), "_explicit_constraints", ()
            ):
                found[constraint.debug_str] = None
    return list(found)


# The dialects in which `jax.export` writes programs, with what holds the functions together.
_DIALECTS = frozenset({"builtin", "func", "stablehlo", "chlo", "sdy"})


def outside_calls(exported: Any) -> list[str]:
    """What a written program (`jax.export.Exported`) calls that is not in it, by its names: the
    targets of XLA's custom calls, and operations of no dialect that JAX writes.

    JAX shows a program as text only; that of a large one is several times its size. Raises
    whatever XLA raises; of bytes that no JAX wrote it may end the process.
    """
    found: set[str] = set()
    with mlir.make_ir_context():
        module = deserialize_portable_artifact(exported.mlir_module_serialized)
        waiting: list[Any] = [module.operation]
        while waiting:
            operation = waiting.pop()
            name: str = operation.name
            if name == "stablehlo.custom_call":
                target = operation.attributes["call_target_name"]
                found.add(target.value_bytes.decode("utf-8", "backslashreplace"))
            elif name.partition(".")[0] not in _DIALECTS:
                found.add(name)
            waiting += [
                inner.operation
                for region in operation.regions
                for block in region
                for inner in block
            ]
    return sorted(found)


def scan_split(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are loop constants, and how many are the carry.

    0.12 replaced ``num_consts`` and ``num_carry`` by a description of the operands' tree.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def policy_name(policy: Any) -> str:
    """The name of a checkpoint policy; 0.10 has objects (``DotsSaveable(...)``) where 0.12 has
    functions (``dots_saveable``)."""
    name = getattr(policy, "__name__", None) or type(policy).__name__
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(name)).lower()


def shard_map_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords with which `jax.shard_map` makes such an equation again, but for mesh and specs.

    Its manual axes are called ``newly_manual_axes`` in the versions that we know.
    """
    axes = params.get("newly_manual_axes", params.get("manual_axes", frozenset()))
    return {"axis_names": axes, "check_vma": params["check_vma"]}


def type_key(value: Any) -> Any:
    """Equal for values for which one program serves. (With explicit shardings a type has more
    than shape and dtype.)"""
    if isinstance(value, (bool, int, float, complex)):
        return (), type(value), True
    aval = getattr(value, "aval", None)
    return aval or (value.shape, value.dtype, bool(getattr(value, "weak_type", False)))


def identity_primitive(
    name: str,
    differentiated: Callable[..., Exception],
    exported: Callable[..., Exception],
    batched: Callable[..., Exception | None],
) -> Any:
    """A primitive that hands on its one operand, and may neither be differentiated nor exported.

    `differentiated` and `exported` make, of its parameters, what is raised then; `batched` too,
    under `jax.vmap`, or None. The tables of
    rules are those that JAX's documentation of new primitives uses, of `jax.interpreters`, whose
    other contents JAX takes away release by release; what tells an export from other lowerings has
    no documentation.
    """
    primitive: Any = jex.Primitive(name)

    def batch(args: Any, axes: Any, **params: Any) -> Any:
        error = batched(**params)
        if error is not None:
            raise error
        return primitive.bind(args[0], **params), axes[0]

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        raise differentiated(**params)  # JAX does not come here where all tangents are zeros

    def lower(context: Any, operand: Any, **params: Any) -> Any:
        if context.module_context.lowering_parameters.for_export:
            raise exported(**params)
        return [operand]

    primitive.def_impl(lambda operand, **params: operand)
    primitive.def_abstract_eval(lambda aval, **params: aval)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    mlir.register_lowering(primitive, lower)
    return primitive


def standing_in_primitive(name: str) -> Any:
    """A primitive of two operands of one type, which hands on the first; its derivative is that of
    the second. Programs contain nothing of it. (For the tables see `identity_primitive`.)"""
    primitive: Any = jex.Primitive(name)

    def batch(args: Any, axes: Any) -> Any:
        size = next(a.shape[i] for a, i in zip(args, axes, strict=True) if i is not None)
        mapped = [
            jax.numpy.broadcast_to(a, (size, *a.shape))
            if i is None
            else jax.numpy.moveaxis(a, i, 0)
            for a, i in zip(args, axes, strict=True)
        ]
        return primitive.bind(*mapped), 0

    def jvp(primals: Any, tangents: Any) -> Any:
        return primitive.bind(*primals), tangents[1]

    primitive.def_impl(lambda value, other: value)
    primitive.def_abstract_eval(lambda value, other: value)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    mlir.register_lowering(primitive, lambda context, value, other: [value])
    return primitive


# ---------------------------------------------------------------------------------- running fast


@functools.cache
def _plain_jit() -> Mapping[str, Any]:
    """What belongs to a call of `jax.jit` without options, but for the program."""
    of_nothing = jax.make_jaxpr(jax.jit(lambda x: x))
    # In a new thread, where there is no mesh.
    with ThreadPoolExecutor(1) as fresh:
        program = fresh.submit(of_nothing, jax.core.ShapedArray((), np.dtype(np.float32))).result()
    (equation,) = opened(program).eqns
    return {name: value for name, value in equation.params.items() if name != "jaxpr"}


@functools.cache
def jit_settings_getter() -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Takes out of the parameters of a jitted call all but the program."""
    return operator.itemgetter(*_plain_jit())


# These change nothing about what a program computes from its arguments.
_ANY = frozenset({"name", "inline", "keep_unused", "donated_invars"})


def is_plain_jit(params: Mapping[str, Any]) -> bool:
    """Whether a jitted function around the program of such a call is called as this one is: there
    are no shardings, layouts, meshes or options of the compiler."""
    for name, usual in _plain_jit().items():
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


# ------------------------------------------------------------------------------------- provenance


def frames(source_info: Any) -> Sequence[Any]:
    """The Python frames that bound an equation, innermost first.

    Each has ``file_name``, ``function_name`` (qualified) and ``line_num``.
    """
    traceback = source_info.traceback
    return () if traceback is None else tuple(traceback.frames)


def user_context() -> Callable[[Any], AbstractContextManager[Any]]:
    """A context whose value is part of the key under which JAX keeps traces and programs."""
    make: Callable[[Any], Callable[[Any], AbstractContextManager[Any]]] = jax.make_user_context
    return make(())


def frame_positions(source_info: Any) -> tuple[list[Any], list[int]]:
    """The code object of each of those frames, and the offsets of the instructions they were at."""
    traceback = source_info.traceback
    return ([], []) if traceback is None else traceback.raw_frames()


def name_stack(source_info: Any) -> str:
    """The named scopes around an equation, relative to its region: ``block_0/attention``."""
    return str(source_info.name_stack)


# A name, and whether it is that of a transformation; else it is that of a scope.
Around = tuple[str, bool]


def around(source_info: Any) -> tuple[Around, ...]:
    """The same apart: the scopes around an equation, from the outside in, and between them the
    transformations that it came through."""
    transformation = _transformation_type()
    return tuple((x.name, isinstance(x, transformation)) for x in source_info.name_stack.stack)


@functools.cache
def _transformation_type() -> type:
    """The class of a transformation in a stack of names: it has no public name."""
    (element,) = source_info_util.new_name_stack().transform("jvp").stack
    return type(element)


# The traceback and the named scopes of what is being bound now.
current_source_info: Callable[[], Any] = source_info_util.current


def function_name(program: Any) -> str:
    """The name of the Python function that a program was traced from."""
    return str(opened(program).debug_info.func_name)


def function_source(program: Any) -> str:
    """That function and where it stands: ``relu at /usr/lib/.../functions.py:71``."""
    return str(opened(program).debug_info.func_src_info or "")


def argument_names(program: Any) -> tuple[str, ...]:
    """Argument names with their pytree paths (``params['w']``), one per input; () if unknown."""
    return tuple(str(name) for name in opened(program).debug_info.arg_names or ())


def hide_frames(directory: str) -> None:
    """Keeps the files below a directory out of JAX's tracebacks and source lines."""
    source_info_util.register_exclusion(directory)


def filters_tracebacks() -> bool:
    """Whether the user wants tracebacks without frames of libraries (JAX's own setting)."""
    return str(getattr(jax.config, "jax_traceback_filtering", "")) != "off"


# ---------------------------------------------------------- functions with rules, as JAX has them
#
# A trace is handed them wrapped: the user's function, what JAX puts around it, and places in which
# a run of it leaves the tree of its results for its caller.


def rule_functions(wrapped: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
    """The user's functions of a rule, and the trees of its arguments (None: not of the plain form,
    as where some arguments are not differentiated)."""
    functions = tuple(fun.f for fun in wrapped)
    if any(len(fun.transforms) != 1 for fun in wrapped):
        return functions, None
    ((_, trees),) = wrapped[0].transforms
    return functions, trees


def rule_and_what_is_around(wrapped: Any) -> tuple[Any, tuple[Any, ...]]:
    """The user's backward function of a rule that stands in a program, and what transformations
    have put around it since: (function, its parameters) of each, without that which flattens the
    arguments."""
    return wrapped.f, tuple(wrapped.transforms[:-1])


def inside_of_rule(wrapped: Any) -> tuple[tuple[Any, ...], frozenset[Any]]:
    """What is inside a function of a rule that stands in a program: the user's functions, and all
    types, trees and positions that JAX's functions around them hold. Nothing if that is not all
    that they hold (as values of arguments that are not differentiated).

    Each transformation that a rule has come through is one more function of JAX around it, which
    closes over those further inside; so is each time that it was bound as it stands in a program.
    """
    functions: list[Any] = []
    around: set[Any] = set()
    pending, seen = [wrapped], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if len(seen) > _MOST_INSIDE:
            return (), frozenset()
        if hasattr(value, "transforms"):
            if not all(f.__name__ in _KNOWN_AROUND_RULES for f, _ in value.transforms):
                return (), frozenset()
            pending.append(value.f)
            pending.extend(item for _, parameters in value.transforms for item in parameters)
        elif isinstance(value, FunctionType) and value.__module__.startswith("jax._src"):
            pending.extend(map(_content, value.__closure__ or ()))
        elif isinstance(value, jax.tree_util.PyTreeDef):
            around.add(value)
        elif isinstance(value, list | tuple):
            if value and all(isinstance(item, _TYPES_AND_POSITIONS) for item in value):
                around.add(tuple(value))
        elif callable(value) and not isinstance(value, type):
            functions.append(value)
    return tuple(functions), frozenset(around)


_KNOWN_AROUND_RULES = frozenset(
    {
        "_flatten_fwd",
        "_flatten_bwd",
        "_flatten_jvp",
        "_handle_consts_in_bwd",
        "batch_subtrace",
        "batch_custom_jvp_subtrace",
    }
)
_MOST_INSIDE = 256
_TYPES_AND_POSITIONS = (int, type(None), jax.core.AbstractValue)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def result_trees(wrapped: Any) -> tuple[Any, ...]:
    """What a run of a wrapped function has left about the trees of its results."""
    return tuple(store and SimpleNamespace(val=store.val) for store in wrapped.stores)


def leave_result_trees(wrapped: Any, trees: tuple[Any, ...]) -> None:
    """Leaves that for the caller in the place of a run."""
    wrapped.populate_stores(trees)


def forget_result_trees(wrapped: Any) -> None:
    """Makes it as if the function had not been run."""
    for store in filter(None, wrapped.stores):
        store.reset()


def has_run(wrapped: Any) -> bool:
    """Whether a wrapped function has left the tree of its results."""
    for store in filter(None, wrapped.stores):
        try:
            if store.val is not None:
                return True
        except Exception:
            pass
    return False


# ------------------------------------------------------------------------------- where we stand


# `current_trace(None)`: the transformation, if any, that what is bound now goes to.
current_trace: Callable[[None], Any] = jex.find_top_trace


# What is bound inside it goes to the given trace.
set_current_trace: Callable[[Any], AbstractContextManager[None]] = jex.set_current_trace


@functools.cache
def top_level_trace_type() -> type:
    """The class of `current_trace(None)` where nothing is being transformed: what is bound then
    runs at once."""
    # With a new thread comes a new, empty stack of transformations.
    with ThreadPoolExecutor(1) as fresh:
        return type(fresh.submit(current_trace, None).result())


def under_jit() -> bool:
    """Whether what is bound now becomes part of a program that something around it compiles."""
    under: Callable[[], bool] = getattr(jex, "unsafe_am_i_under_a_jit_DO_NOT_USE")  # noqa: B009
    return under()


@functools.cache
def keep_recompute_options(backend: str) -> dict[str, str] | None:
    """The compiler options without which XLA merges recomputed code with the original, or None.

    Before 0.11.2 XLA's CPU pipeline drops the barrier that `jax.checkpoint` emits ahead of common
    subexpression elimination, which then merges both copies, so that every activation stays
    alive. With the barrier kept, the pass that makes one kernel of a small loop aborts the process
    when it meets one in the loop, so it must be off as well. That changes programs with small
    loops: the options are for programs that recompute, and for no others.
    Can go when 0.11.2 is the oldest supported JAX.
    """
    if VERSION < (0, 11, 2) and backend == "cpu":
        return {"xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"}
    return None


def with_compiler_options(options: Mapping[str, Any], extra: Mapping[str, str]) -> dict[str, Any]:
    """Options of `jax.jit` with more compiler options; lists of XLA's passes are joined."""
    own = options.get("compiler_options") or {}
    joined = {key: ",".join(filter(None, (own.get(key), value))) for key, value in extra.items()}
    return {**options, "compiler_options": {**own, **joined}}


# -------------------------------------------------------------------------------------- arrays


# Waits for the arrays of a tree; raises what the program raised that was to compute them.
wait_for: Callable[[Any], Any] = jax.block_until_ready


def is_tracer(value: object) -> bool:
    """Whether a value exists only inside a transformation."""
    return isinstance(value, jax.core.Tracer)


def fresh_alias(array: Any) -> Any:
    """Another array object for the same value: what is told apart by identity is another.

    The first one shares the buffers, so that donating it deletes both, and takes a microsecond.
    An array on one device keeps that one and would give it again, so each further one is a copy:
    what else shares a buffer commits it to its device, or makes a weak type strong.
    """
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return jax.numpy.array(array, copy=True)
    if len(array.sharding.device_set) > 1 or not array.is_fully_addressable:
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    shared = array.addressable_data(0)
    identity = id(shared)
    known = weakref.ref(shared, lambda _: _given_out.pop(identity, None) and None)
    if shared is not array and _given_out.setdefault(identity, known) is known:
        return shared
    with jax.ensure_compile_time_eval():  # not recorded by a tape
        return jax.numpy.array(array, copy=True)


_given_out: dict[int, weakref.ref[Any]] = {}  # by identity, as long as they live


# ---------------------------------------------------------------------------------- placeholders


class _Nowhere(jax.core.Trace):
    """The transformation to which a `Placeholder` belongs: nothing is computed in it."""

    __slots__ = ("_check",)

    def __init__(self, check: Callable[[], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check

    def is_valid(self) -> bool:  # asked by JAX for every operand of everything that is bound
        self._check()
        return True

    def process_primitive(self, primitive: Any, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{primitive} is computed where a placeholder has no value")


class Placeholder(jax.core.Tracer):  # type: ignore[type-arg]
    """A traced value of a type, and no more: what a program computes with it has it as a constant.

    `check` is called whenever something is computed with it, and may raise.
    """

    __slots__ = ("_check", "stands_for")

    def __init__(self, aval: Any, stands_for: Any, check: Callable[[], None]):
        super().__init__(_Nowhere(check), aval)
        self.stands_for = stands_for
        self._check = check

    @property
    def _debug_info(self) -> None:  # asked by JAX for the message that a tracer has escaped
        self._check()


@functools.cache
def staging_trace_type() -> type:
    """The class of the transformations that make programs: `jax.make_jaxpr`, the body of a scan."""
    found: list[type] = []
    jax.make_jaxpr(lambda: found.append(type(current_trace(None))))()
    return found[0]


def staging_trace() -> Any:
    """The innermost program that what is bound now becomes a part of; None where there is none."""
    kind = staging_trace_type()
    trace = current_trace(None)
    while trace is not None and not isinstance(trace, kind):
        trace = parent_trace(trace)
    return trace


def is_part_of_a_program() -> bool:
    """Whether the program that is being traced now becomes a part of another one."""
    trace, kind, count = current_trace(None), staging_trace_type(), 0
    while trace is not None:
        count += isinstance(trace, kind)
        trace = parent_trace(trace)
    return count > 1


def parent_trace(trace: Any) -> Any:
    """The transformation around a transformation; None outside of all."""
    return getattr(trace, "parent_trace", None)


def trace_of(tracer: Any) -> Any:
    """The transformation to which a tracer belongs."""
    return tracer._trace


@contextmanager
def outside_of(trace: Any) -> Iterator[None]:
    """What is inside it is bound to whatever is around a transformation."""
    with set_current_trace(parent_trace(trace)):
        yield
