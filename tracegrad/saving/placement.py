"""How an array was split over devices: as it is written down, and where that can be had again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from tracegrad import _jax
from tracegrad.saving.manifest import ArrayRecord, Placement
from tracegrad.saving.variables import stored_form
from tracegrad.variables.variable import Variable


def placement_of(sharding: Any) -> Placement | None:
    """What is written down of a sharding; None where there is nothing: of one device, or one of
    another kind than `NamedSharding`, which names no axes that could be found again."""
    if not isinstance(sharding, NamedSharding) or len(sharding.device_set) == 1:
        return None
    names = tuple((str(name), int(size)) for name, size in sharding.mesh.shape.items())
    return Placement(names, tuple(map(_names, sharding.spec)))


def array_record(variable: Variable, value: Any) -> ArrayRecord:
    """What is written down of the array of a Variable."""
    placement = placement_of(stored_form(value).sharding)
    return ArrayRecord(str(variable.dtype), tuple(variable.shape), placement)


def _names(entry: Any) -> tuple[str, ...] | None:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return None
    return (entry,) if isinstance(entry, str) else tuple(map(str, entry))


def where_it_was(placement: Placement | None, what: str) -> Sharding | None:
    """The sharding that was written down, on the mesh that is set; None where none is set.

    That mesh may have other sizes: a state that was written on eight devices is read on four.

    Raises ValueError where the mesh has not those axes.
    """
    mesh = _mesh_set()
    if placement is None or mesh.empty:
        return None
    spec = PartitionSpec(*placement.spec)  # type: ignore[no-untyped-call]
    return _on_mesh(spec, mesh, f"{what}, saved as {spec} of a mesh {dict(placement.mesh)}")


def asked_for(sharding: Any, name: str, what: str, *, of_keys: bool) -> Sharding | None:
    """What `sharding=` says of the Variable of this name; None: nothing. If it is one `of_keys`, of
    random numbers, that is how their words shall lie, which are stored.

    Raises ValueError where a mesh is not set, or has not those axes.
    """
    if isinstance(sharding, Mapping):
        sharding = sharding.get(name)
    if isinstance(sharding, PartitionSpec):
        sharding = _on_mesh(sharding, _mesh_set(), f"{what}, to be split as {sharding}")
    if not isinstance(sharding, Sharding | None):
        raise TypeError(
            "sharding should be a jax.sharding.Sharding, a PartitionSpec, or a dictionary from the "
            f"names of Variables to these, and is {sharding!r}"
        )
    if of_keys and isinstance(sharding, NamedSharding):  # the words have one more axis
        spec = PartitionSpec(*sharding.spec, None)  # type: ignore[no-untyped-call]
        return NamedSharding(sharding.mesh, spec)
    return sharding


def _mesh_set() -> Any:
    with _jax.at_top_level():  # JAX asks for that; a tape, say, is not
        return jax.sharding.get_mesh()


def _on_mesh(spec: PartitionSpec, mesh: Any, what: str) -> Sharding:
    used = [name for entry in spec for name in _names(entry) or ()]
    unknown = [name for name in used if name not in mesh.shape]
    if unknown:
        there = f"has the axes {dict(mesh.shape)}" if not mesh.empty else "is none"
        raise ValueError(
            f"{what}: the mesh that is set {there}, without {', '.join(map(repr, unknown))}. Set "
            "one that has them (jax.set_mesh), or say by `sharding=` how it shall be split"
        )
    return NamedSharding(mesh, spec)


def on(array: Any, sharding: Sharding | None, what: str) -> Any:
    """A `jax.Array` of an array in NumPy, split in this way; this process gets what its devices do.

    JAX may share the memory of `array`, so nobody else may have it.

    Raises ValueError where `what`, that is the array, cannot be split so.
    """

    if sharding is None:
        return jax.device_put(array)
    try:
        sharding.shard_shape(array.shape)
    except ValueError as error:
        raise ValueError(f"{what} cannot be split as {sharding}: {error}") from error
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index], dtype=array.dtype
    )
