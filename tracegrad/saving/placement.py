"""Records the shardings of arrays in a file, and makes shardings from the records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from tracegrad import _jax
from tracegrad.ir.wording import some
from tracegrad.saving.manifest import ArrayRecord, Placement
from tracegrad.saving.variables import stored_form
from tracegrad.variables.variable import Variable


def placement_of(sharding: Any) -> Placement | None:
    """Returns None for a single device, and for a sharding that is no `NamedSharding`: only a
    sharding with axis names can be made again on another mesh."""
    if not isinstance(sharding, NamedSharding) or len(sharding.device_set) == 1:
        return None
    names = tuple((str(name), int(size)) for name, size in sharding.mesh.shape.items())
    return Placement(names, tuple(map(_axis_names, sharding.spec)))


def array_record(variable: Variable, value: Any) -> ArrayRecord:
    placement = placement_of(stored_form(value).sharding)
    return ArrayRecord(str(variable.dtype), tuple(variable.shape), placement)


def _axis_names(entry: Any) -> tuple[str, ...] | None:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return None
    return (entry,) if isinstance(entry, str) else tuple(map(str, entry))


def recorded_sharding(placement: Placement | None, what: str) -> Sharding | None:
    """Returns the recorded sharding on the current mesh; None without a record or a mesh.

    The axes may have other sizes than in the record: a state saved on eight devices loads on four.
    Raises ValueError if the mesh lacks an axis of the record.
    """
    mesh = _current_mesh()
    if placement is None or mesh.empty:
        return None
    spec = PartitionSpec(*placement.spec)  # type: ignore[no-untyped-call]
    return _sharding_on_mesh(
        spec, mesh, f"{what}, saved as {spec} of a mesh {dict(placement.mesh)}"
    )


def requested_sharding(sharding: Any, name: str, what: str, *, of_keys: bool) -> Sharding | None:
    """Returns the sharding that the user's `sharding=` has for a Variable; None if it has none.

    With `of_keys` the Variable holds random keys, and the sharding is for the stored words of the
    keys, which have one more axis.

    Raises ValueError if the mesh lacks an axis of a PartitionSpec, or no mesh is set; TypeError if
    `sharding` is of another type.
    """
    if isinstance(sharding, Mapping):
        sharding = sharding.get(name)
    if isinstance(sharding, PartitionSpec):
        sharding = _sharding_on_mesh(
            sharding, _current_mesh(), f"{what}, to be sharded as {sharding}"
        )
    if not isinstance(sharding, Sharding | None):
        raise TypeError(
            "sharding should be a jax.sharding.Sharding, a PartitionSpec, or a dictionary that "
            f"maps names of Variables to one of the two; for {name!r} it is {sharding!r}"
        )
    if of_keys and isinstance(sharding, NamedSharding):  # the words of a key are one more axis
        spec = PartitionSpec(*sharding.spec, None)  # type: ignore[no-untyped-call]
        return NamedSharding(sharding.mesh, spec)
    return sharding


def check_names(sharding: Any, names: Iterable[str]) -> None:
    """Raises ValueError if `sharding` is a dictionary with a key that is no name of a Variable."""
    known = list(names)
    unknown = set(sharding).difference(known) if isinstance(sharding, Mapping) else ()
    if unknown:
        raise ValueError(
            f"sharding has {some(sorted(map(repr, unknown)), 5)}; the names of the Variables are "
            f"{some(list(map(repr, known)), 5)}"
        )


def _current_mesh() -> Any:
    with _jax.at_top_level():  # `get_mesh` raises inside of a trace, such as that of a tape
        return jax.sharding.get_mesh()


def _sharding_on_mesh(spec: PartitionSpec, mesh: Any, what: str) -> Sharding:
    used = [name for entry in spec for name in _axis_names(entry) or ()]
    unknown = [name for name in used if name not in mesh.shape]
    if unknown:
        there = f"the mesh has the axes {dict(mesh.shape)}" if not mesh.empty else "no mesh is set"
        raise ValueError(
            f"{what}: {there}, but the axes {', '.join(map(repr, unknown))} are needed. Set a mesh "
            "with these axes (jax.set_mesh), or pass another sharding by `sharding=`"
        )
    return NamedSharding(mesh, spec)


def put_on_devices(array: Any, sharding: Sharding | None, what: str) -> Any:
    """Without a sharding, the default device has the array. With one, each process copies only its
    own shards. JAX may share the memory of `array`, so no other code may use `array` afterwards.

    Raises ValueError if the sharding does not fit the shape; `what` names the array in the message.
    """
    if sharding is None:
        return jax.device_put(array)
    try:
        sharding.shard_shape(array.shape)
    except ValueError as error:
        raise ValueError(f"{what} cannot be sharded as {sharding}: {error}") from error
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index], dtype=array.dtype
    )
