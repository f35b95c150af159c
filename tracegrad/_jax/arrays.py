"""Arrays and their types: what is differentiated in them, how they are written, and aliases."""

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
"""The type of what is an array, and no reference."""


def has_gradient(aval: Any) -> bool:
    """Whether an array, or a type, has cotangents: the float and complex ones."""
    return is_inexact(getattr(aval, "dtype", None))


# Asked of every value of every graph: `tracegrad.graph` takes a tenth longer without it.
@cached(256)
def is_inexact(dtype: Any) -> bool:
    """Whether a dtype is float or complex; None, for a value without a dtype, is not."""
    return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


_OF_64_BITS = frozenset({np.dtype(np.float64), np.dtype(np.complex128)})
_AS_IT_IS = nullcontext()


def as_computed(arrays: Iterable[Any]) -> AbstractContextManager[None]:
    """A block that differentiates with as many bits as arrays were computed with: those of 64 may
    come out of a block of `jax.enable_x64`, after which JAX would mix them with some of 32."""
    for array in arrays:
        if array.dtype in _OF_64_BITS and not jax.config.jax_enable_x64:
            wide: AbstractContextManager[None] = jax.enable_x64(True)
            return wide
    return _AS_IT_IS


def is_reference(aval: object) -> bool:
    """Whether a type is not that of an array, but of a place that arrays are written to."""
    return not isinstance(aval, ARRAY)


def no_cotangent(aval: Any) -> Any:
    """What JAX takes for the (co)tangent of an integer: zeros of the empty dtype ``float0``."""
    return np.zeros(aval.shape, jax.dtypes.float0)


def local_shape(aval: Any) -> Sequence[Any]:
    """The shape of what one device holds of a value: on an explicit mesh less than all of it."""
    shape: Sequence[Any] = getattr(aval, "shape", ())
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return shape
    # (Of a mesh that has manual axes too, JAX has no shapes of shards.)
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
    """The JAX type of a leaf; None for what is no array, and for a part of a reference, `ref.at[i]`
    (to JAX several operands; the error of `jax.typeof` is of a kind of its own)."""
    try:
        return jax.typeof(leaf)
    except Exception:
        return None


def is_on_host(aval: Any) -> bool:
    """Whether a value of a type is in the memory of the host and not of the device."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def varying_axes(aval: Any) -> frozenset[str]:
    """The axes over which a value varies, where a `jax.shard_map` looks at that (``check_vma``)."""
    axes = getattr(aval, "manual_axis_type", None)
    return frozenset() if axes is None else axes.varying


def varying_as(array: Any, aval: Any) -> Any:
    """The array, marked as varying over the axes over which values of a type vary."""
    return _varying(array, varying_axes(aval))


def varying_alike(arrays: Sequence[Any], others: Sequence[Any] = ()) -> list[Any]:
    """The arrays, each marked as varying over all axes over which one of them, or of `others`,
    varies."""
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in (*arrays, *others)))
    return [_varying(x, axes) for x in arrays] if axes else list(arrays)


def _varying(array: Any, axes: frozenset[str]) -> Any:
    more = tuple(axes - varying_axes(jax.typeof(array)))
    return jax.lax.pcast(array, more, to="varying") if more else array


def placed(aval: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """A `jax.ShapeDtypeStruct` of a type, to lower a program for: on the devices of the value, if
    they are known.

    An explicit mesh without devices stands for the mesh that is set. With automatic axes the type
    does not say how the value lies: it is placed on one device.
    """
    if sharding is None:
        typed = getattr(without_devices(aval), "sharding", None)
        if typed is not None and not typed.mesh.empty:
            sharding = typed
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False)
    )


def align(avals: Sequence[Any], flowing: Sequence[Any]) -> list[Any]:
    """One (co)tangent for every type: the given ones, and JAX's empty ones for integers."""
    rest = iter(flowing)
    return [next(rest) if has_gradient(aval) else no_cotangent(aval) for aval in avals]


def type_text(aval: Any) -> str:
    """``f32[8,4]``; a leading ``~`` marks a weak type. Of a type of keys with an explanation in
    its name (``key<name: explanation>[4]``) only the name."""
    text = re.sub(r"(key<[^:>]*):[^>]*>", r"\1>", aval.str_short(short_dtypes=True))
    return f"~{text}" if getattr(aval, "weak_type", False) else str(text)


def type_key(value: Any) -> Any:
    """Equal for values for which one program serves. (With explicit shardings a type has more
    than shape and dtype.)"""
    aval = getattr(value, "aval", None)
    if aval is not None:
        return aval
    if isinstance(value, (bool, int, float, complex)):
        return (), type(value), True
    return value.shape, value.dtype, bool(getattr(value, "weak_type", False))


_SINGLE = jax.sharding.SingleDeviceSharding


def array_type(array: Any) -> Any:
    """`jax.typeof`, at a tenth of its cost for an array on one device."""
    if type(getattr(array, "sharding", None)) is _SINGLE:
        return array.aval
    return jax.typeof(array)


def struct(shape: Sequence[Any], dtype: Any, weak_type: bool = False) -> Any:
    """A `jax.ShapeDtypeStruct`, which has no types of its own in the versions that we know."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type=weak_type)  # type: ignore[no-untyped-call]


def is_split_by_xla(aval: Any) -> bool:
    """Whether values of a type lie on a mesh where XLA decides what each device holds of them."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    auto = jax.sharding.AxisType.Auto
    if mesh is None or mesh.empty:
        return False
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(kind is auto and mesh.shape[name] > 1 for name, kind in kinds)


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


# Waits for the arrays of a tree; raises what the program raised that was to compute them.
wait_for: Callable[[Any], Any] = jax.block_until_ready


def is_tracer(value: object) -> bool:
    """Whether a value exists only inside a transformation."""
    return isinstance(value, jax.core.Tracer)


def undifferentiated(value: Any) -> Any:
    """A traced value without what is being differentiated of it: of what only a derivative's tracer
    stands around, the plain value."""
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        # JAX stops nothing there, since keys have no gradient; a rule's results have a tracer.
        bits = jax.lax.stop_gradient(jax.random.key_data(value))
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(value))
    return jax.lax.stop_gradient(value)


def fresh_alias(array: Any) -> Any:
    """Another array object with the same value, for tables that know arrays by identity.

    The first one shares the buffers, so that donating it deletes both, and takes a microsecond.
    An array on one device keeps that one and would give it again, so each further one is a copy:
    what else shares a buffer commits it to its device, or makes a weak type strong. An alias of an
    alias is copied too, in the end: each keeps the next one alive, and JAX frees a long row of them
    by recursion, until the stack is full.
    """
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return jax.numpy.array(array, copy=True)
    if len(array.sharding.device_set) > 1 or not array.is_fully_addressable:
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    shared = array.addressable_data(0)
    identity = id(shared)
    known = weakref.ref(shared, lambda _: _given_out.pop(identity, None) and None)
    _, behind = _given_out.get(id(array), (None, 0))
    if shared is not array and behind < _MOST_IN_A_ROW:
        given = _given_out.setdefault(identity, (known, behind + 1))
        if given[0] is known:
            return shared
    with at_top_level():  # not recorded by a tape
        return jax.numpy.array(array, copy=True)


# No cache, but the aliases in use, by identity, as long as they live; with each how many it is
# away from an array that is none.
_given_out: dict[int, tuple[weakref.ref[Any], int]] = {}
_MOST_IN_A_ROW = 100
