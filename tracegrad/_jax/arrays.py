"""Answers questions about arrays and their types: dtypes, shardings, texts, keys, aliases."""

from __future__ import annotations

import itertools
import math
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from tracegrad._jax.caches import cached
from tracegrad._jax.traces import at_top_level

ARRAY = jax.core.ShapedArray
"""The class of the types of arrays; references have another class."""


def has_gradient(aval: Any) -> bool:
    """Whether an array or a type has cotangents: a float or complex dtype."""
    return is_inexact(getattr(aval, "dtype", None))


# Called for every value of every graph: without the cache `tracegrad.graph` takes a tenth longer.
@cached(256)
def is_inexact(dtype: Any) -> bool:
    """Whether a dtype is float or complex; None stands for a value without a dtype."""
    return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


_FLOATS_OF_64_BITS = frozenset({np.dtype(np.float64), np.dtype(np.complex128)})
_NO_CHANGE = nullcontext()


def enable_x64_for(arrays: Iterable[Any]) -> AbstractContextManager[None]:
    """Returns a context manager that enables 64 bits if a float array has 64 bits.

    Such an array may come from a block of `jax.enable_x64`; if JAX is set to 32 bits after the
    block, differentiating would mix the array with arrays of 32 bits.
    """
    for array in arrays:
        if array.dtype in _FLOATS_OF_64_BITS and not jax.config.jax_enable_x64:
            enabled: AbstractContextManager[None] = jax.enable_x64(True)
            return enabled
    return _NO_CHANGE


def is_reference(aval: object) -> bool:
    """Whether a type is the type of a `jax.Ref`, not of an array."""
    return not isinstance(aval, ARRAY)


def stacked_type(aval: Any, length: int) -> Any:
    """Returns the type of `length` values of a type, stacked along a new axis 0."""
    spec = aval.sharding.spec
    sharding = aval.sharding.update(spec=type(spec)(None, *spec))
    return aval.update(shape=(length, *aval.shape), sharding=sharding, weak_type=False)


def no_cotangent(aval: Any) -> Any:
    """JAX's (co)tangent of an integer: zeros of the empty dtype ``float0``."""
    return np.zeros(aval.shape, jax.dtypes.float0)


def local_shape(aval: Any) -> Sequence[Any]:
    """The shape of one device's shard of a value, as far as its type knows: only explicit mesh axes
    divide a size, since the type does not mention other axes."""
    shape: Sequence[Any] = getattr(aval, "shape", ())
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return shape
    # (JAX's `shard_shape` does not support a mesh that has manual axes as well.)
    mesh, explicit = sharding.mesh, jax.sharding.AxisType.Explicit
    sizes = {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is explicit
    }
    axes = [names if isinstance(names, tuple) else (names,) for names in sharding.spec]
    return tuple(
        size // math.prod(sizes.get(name, 1) for name in names)
        for size, names in itertools.zip_longest(shape, axes, fillvalue=())
    )


def type_of(leaf: Any) -> Any:
    """Returns the type of an array or Ref. Returns None for another leaf, and for a part of a Ref,
    `ref.at[i]` (several operands to JAX; `jax.typeof` raises an undocumented error)."""
    try:
        return jax.typeof(leaf)
    except Exception:
        return None


def varying_axes(aval: Any) -> frozenset[str]:
    """The mesh axes over which a value varies, in a `jax.shard_map` with ``check_vma``."""
    axes = getattr(aval, "manual_axis_type", None)
    return frozenset() if axes is None else axes.varying


def varying_as(array: Any, aval: Any) -> Any:
    """Marks an array as varying over the `varying_axes` of a type."""
    return _varying(array, varying_axes(aval))


def varying_alike(arrays: Sequence[Any], others: Sequence[Any] = ()) -> list[Any]:
    """Marks each array as varying over the union of the `varying_axes` of `arrays` and `others`."""
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in (*arrays, *others)))
    return [_varying(x, axes) for x in arrays] if axes else list(arrays)


def _varying(array: Any, axes: frozenset[str]) -> Any:
    more = tuple(axes - varying_axes(jax.typeof(array)))
    return jax.lax.pcast(array, more, to="varying") if more else array


def placed(aval: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Returns a `jax.ShapeDtypeStruct` of a type, for lowering; by default with the type's own
    sharding.

    An explicit mesh without devices stands for the current mesh. If the axes of the mesh are
    automatic, the type does not have the value's sharding, and the value is placed on one device.
    """
    if sharding is None:
        own_sharding = getattr(without_devices(aval), "sharding", None)
        if own_sharding is not None and not own_sharding.mesh.empty:
            sharding = own_sharding
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False)
    )


def insert_float0(avals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Returns a (co)tangent for each type: float and complex types get the next of `cotangents`,
    other types zeros of dtype ``float0``."""
    rest = iter(cotangents)
    return [next(rest) if has_gradient(aval) else no_cotangent(aval) for aval in avals]


def type_text(aval: Any) -> str:
    """Returns a type as text, ``f32[8,4]``; a leading ``~`` marks a weak type. Removes the
    explanation in the name of a key type (``key<name: explanation>[4]``)."""
    text = re.sub(r"(key<[^:>]*):[^>]*>", r"\1>", aval.str_short(short_dtypes=True))
    return f"~{text}" if getattr(aval, "weak_type", False) else str(text)


def type_key(value: Any) -> Any:
    """Returns a key that is equal for two values if a program traced for one is valid for the
    other. (With explicit shardings a type has more than shape and dtype.)"""
    aval = getattr(value, "aval", None)
    if aval is not None:
        return aval
    if isinstance(value, (bool, int, float, complex)):
        return (), type(value), True
    return value.shape, value.dtype, bool(getattr(value, "weak_type", False))


def struct(shape: Sequence[Any], dtype: Any, weak_type: bool = False) -> Any:
    """Returns a `jax.ShapeDtypeStruct`, whose constructor JAX has not annotated with types yet."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type=weak_type)  # type: ignore[no-untyped-call]


def is_split_by_xla(aval: Any) -> bool:
    """Whether XLA decides how values of a type are sharded: a mesh axis is automatic."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    auto = jax.sharding.AxisType.Auto
    if mesh is None or mesh.empty:
        return False
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(kind is auto and mesh.shape[name] > 1 for name, kind in kinds)


def without_devices(aval: Any) -> Any:
    """Removes the sharding from a type, unless programs depend on explicit or manual axes.

    The type of an array on several devices names their mesh even if all axes are automatic, and a
    program that is exported for the type runs on exactly as many devices.
    """
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    kinds = getattr(mesh, "axis_types", None) or ()
    if any(kind != jax.sharding.AxisType.Auto for kind in kinds):
        return aval
    return struct(aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False)))


# Waits for the arrays of a tree; raises the error, if any, of the program that computes them.
wait_for: Callable[[Any], Any] = jax.block_until_ready


def is_tracer(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


def undifferentiated(value: Any) -> Any:
    """Stops the gradient of a value, and unwraps the tracers of derivatives around the value."""
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        # `stop_gradient` leaves keys alone, since keys have no gradient; but a key that a custom
        # rule returns has a tracer.
        bits = jax.lax.stop_gradient(jax.random.key_data(value))
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(value))
    return jax.lax.stop_gradient(value)


def fresh_alias(array: Any) -> Any:
    """Returns a new array object with the same value, for tables that know arrays by identity.

    The first alias of an array shares the array's buffers: making the alias takes a microsecond,
    but donating the alias deletes both. An array on one device keeps its alias and would return the
    same object again, so further aliases are copies: other ways to share a buffer would commit the
    array to its device, or make a weak type strong. After `_MAX_DEPTH` aliases of aliases, the next
    alias is a copy too: each alias keeps its array alive, and JAX frees a long chain by recursion,
    which overflows the stack.
    """
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return jax.numpy.array(array, copy=True)
    if len(array.sharding.device_set) > 1 or not array.is_fully_addressable:
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    shared = array.addressable_data(0)
    identity = id(shared)
    ref = weakref.ref(shared, lambda _: _aliases.pop(identity, None) and None)
    _, depth = _aliases.get(id(array), (None, 0))
    if shared is not array and depth < _MAX_DEPTH:
        first_ref, _ = _aliases.setdefault(identity, (ref, depth + 1))
        if first_ref is ref:  # the alias is new: no other caller has it
            return shared
    with at_top_level():  # not recorded by a tape
        return jax.numpy.array(array, copy=True)


def as_another_object(result: Any, operands: Iterable[Any]) -> Any:
    """Returns `result`, as a new object if a function has returned one of its operands: tables that
    know arrays by identity would take the two for one array."""
    is_operand = isinstance(result, jax.Array) and any(result is each for each in operands)
    return fresh_alias(result) if is_operand and not is_tracer(result) else result


# By identity: the aliases that are alive (this is not a cache), each with its depth, the length of
# the chain of aliases from the original array.
_aliases: dict[int, tuple[weakref.ref[Any], int]] = {}
_MAX_DEPTH = 100
