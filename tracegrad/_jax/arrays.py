"""Arrays and their types: dtypes with gradients, shardings, types as text, and array aliases."""

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
    """Float or complex. None stands for a value without a dtype."""
    return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


_OF_64_BITS = frozenset({np.dtype(np.float64), np.dtype(np.complex128)})
_AS_IT_IS = nullcontext()


def as_computed(arrays: Iterable[Any]) -> AbstractContextManager[None]:
    """A block with 64 bits enabled, if an array has 64 bits but JAX is set to 32.

    Such an array may come from a block of `jax.enable_x64`; differentiating after that block, JAX
    would mix the array with arrays of 32 bits.
    """
    for array in arrays:
        if array.dtype in _OF_64_BITS and not jax.config.jax_enable_x64:
            wide: AbstractContextManager[None] = jax.enable_x64(True)
            return wide
    return _AS_IT_IS


def is_reference(aval: object) -> bool:
    """Whether a type is the type of a `jax.Ref`, not of an array."""
    return not isinstance(aval, ARRAY)


def no_cotangent(aval: Any) -> Any:
    """JAX's (co)tangent of an integer: zeros of the empty dtype ``float0``."""
    return np.zeros(aval.shape, jax.dtypes.float0)


def local_shape(aval: Any) -> Sequence[Any]:
    """The shape of one device's shard of a value. Only explicit mesh axes divide a size: the type
    does not mention other axes."""
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
    """None for a leaf that is not an array, and for a part of a reference, `ref.at[i]` (several
    operands to JAX; `jax.typeof` raises an undocumented error)."""
    try:
        return jax.typeof(leaf)
    except Exception:
        return None


def is_on_host(aval: Any) -> bool:
    """Whether values of a type are in the host's memory, not the device's."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def varying_axes(aval: Any) -> frozenset[str]:
    """The mesh axes over which a value varies, in a `jax.shard_map` with ``check_vma``."""
    axes = getattr(aval, "manual_axis_type", None)
    return frozenset() if axes is None else axes.varying


def varying_as(array: Any, aval: Any) -> Any:
    """Marks an array as varying over the mesh axes of `varying_axes(aval)`."""
    return _varying(array, varying_axes(aval))


def varying_alike(arrays: Sequence[Any], others: Sequence[Any] = ()) -> list[Any]:
    """Marks each array as varying over the union of the `varying_axes` of `arrays` and `others`."""
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in (*arrays, *others)))
    return [_varying(x, axes) for x in arrays] if axes else list(arrays)


def _varying(array: Any, axes: frozenset[str]) -> Any:
    more = tuple(axes - varying_axes(jax.typeof(array)))
    return jax.lax.pcast(array, more, to="varying") if more else array


def placed(aval: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Returns a `jax.ShapeDtypeStruct` of a type, for lowering. `sharding`: default: the type's.

    An explicit mesh without devices stands for the current mesh. If the axes of the mesh are
    automatic, the type does not have the value's sharding, and the value is placed on one device.
    """
    if sharding is None:
        typed = getattr(without_devices(aval), "sharding", None)
        if typed is not None and not typed.mesh.empty:
            sharding = typed
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False)
    )


def align(avals: Sequence[Any], flowing: Sequence[Any]) -> list[Any]:
    """Returns a (co)tangent for each type: the next of `flowing`, or ``float0`` for integers."""
    rest = iter(flowing)
    return [next(rest) if has_gradient(aval) else no_cotangent(aval) for aval in avals]


def type_text(aval: Any) -> str:
    """``f32[8,4]``; a leading ``~`` marks a weak type. Removes the explanation in the name of a key
    type (``key<name: explanation>[4]``)."""
    text = re.sub(r"(key<[^:>]*):[^>]*>", r"\1>", aval.str_short(short_dtypes=True))
    return f"~{text}" if getattr(aval, "weak_type", False) else str(text)


def type_key(value: Any) -> Any:
    """Equal keys: a program traced for one value is valid for the other. (With explicit shardings a
    type has more than shape and dtype.)"""
    aval = getattr(value, "aval", None)
    if aval is not None:
        return aval
    if isinstance(value, (bool, int, float, complex)):
        return (), type(value), True
    return value.shape, value.dtype, bool(getattr(value, "weak_type", False))


_SINGLE = jax.sharding.SingleDeviceSharding


def array_type(array: Any) -> Any:
    """`jax.typeof(array)`; for an array on one device in a tenth of the time."""
    if type(getattr(array, "sharding", None)) is _SINGLE:
        return array.aval
    return jax.typeof(array)


def struct(shape: Sequence[Any], dtype: Any, weak_type: bool = False) -> Any:
    """JAX has not annotated the constructor of `jax.ShapeDtypeStruct` with types yet."""
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
    array to its device, or make a weak type strong. After `_MOST_IN_A_ROW` aliases of aliases, the
    next alias is a copy too: each alias keeps its array alive, and JAX frees a long chain by
    recursion, which overflows the stack.
    """
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return jax.numpy.array(array, copy=True)
    if len(array.sharding.device_set) > 1 or not array.is_fully_addressable:
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    shared = array.addressable_data(0)
    identity = id(shared)
    known = weakref.ref(shared, lambda _: _given_out.pop(identity, None) and None)
    _, depth = _given_out.get(id(array), (None, 0))
    if shared is not array and depth < _MOST_IN_A_ROW:
        given = _given_out.setdefault(identity, (known, depth + 1))
        if given[0] is known:
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
_given_out: dict[int, tuple[weakref.ref[Any], int]] = {}
_MOST_IN_A_ROW = 100
