"""Arrays that no process holds alone: each writes its part, and one file names them all.

That one file is what is saved, and takes the place of the old one in one step, after all parts
are there; the parts have names of their own, by a number of the run that wrote them. So whichever
process is killed, and when, the old file with its parts is there, or the new one with its own. All
files are containers, so that damage is found. ``docs/artefact.md`` says what is in them.

Orbax, the ecosystem's tool for checkpoints, is not used: a saved Variable and a saved function are
one kind of file here, which the same reader checks before anything of it is taken.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad._jax.processes import agree
from tracegrad._version import __version__
from tracegrad.ir.wording import some
from tracegrad.saving import documents
from tracegrad.saving.container import MANIFEST, SEAL, Container, naming, write_container
from tracegrad.saving.documents import Natural
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.manifest import Versions, check_unique
from tracegrad.saving.placement import Placement, placement_of
from tracegrad.saving.stored import Bounds, Piece, StoredArray, bounds_of, bounds_of_all, volume
from tracegrad.saving.tensors import Array, dtype_named, in_order


@dataclass(frozen=True)
class PieceRecord:
    """Which part has a piece of an array, and the bounds of the piece along each axis."""

    part: Natural
    bounds: tuple[tuple[Natural, Natural], ...]


@dataclass(frozen=True)
class ArrayRecord:
    """One array: dtype and shape as it is stored, how it was split, and where its pieces are."""

    name: str
    dtype: str
    shape: tuple[Natural, ...]
    placement: Placement | None
    pieces: tuple[PieceRecord, ...]


@dataclass(frozen=True)
class Parts:
    """What the one file says: `run` is different each time; `parts` are files beside it."""

    versions: Versions
    run: str
    parts: tuple[str, ...]
    arrays: tuple[ArrayRecord, ...]


@dataclass(frozen=True)
class Part:
    """What a part says of itself: to which run it belongs, and which of its parts it is."""

    run: str
    part: Natural


# --------------------------------------------------------------------------------------- written


def write_parts(path: str, values: Mapping[str, Any], timeout: float) -> None:
    """Writes arrays by their names; called by all processes at once.

    Args:
        path: the file that names the parts, which are beside it: in a folder that all see.
        values: arrays of which a process may hold a part, or all. Of what each holds for itself
            process 0 writes its own.
        timeout: how long to wait for another process, in seconds.

    Raises:
        TimeoutError: some processes did not come; nothing is saved, or, where process 0 is among
            them, it is not known.
        RuntimeError: another process could not write its part; nothing is saved.
        ValueError: the processes want to save different things.
        OSError: this process cannot write its part; nothing is saved.
    """
    own = jax.process_index()
    topic = f"save_variables({os.path.basename(path)!r})"
    plans = {name: _plan(value) for name, value in values.items()}
    said = json.dumps({name: _summary(value, plans[name]) for name, value in values.items()})
    run = agree(topic, said, timeout, functools.partial(_new_run, topic))
    owners = sorted({owner for plan in plans.values() for owner in plan.values()})
    names = tuple(_part_name(path, run, k, len(owners)) for k in range(len(owners)))
    new = _beside(path, names)

    fault: Exception | None = None
    try:
        if own in owners:
            place = owners.index(own)
            pieces = in_order(_own_pieces(values, plans, own))
            write_container(new[place], pieces, Part(run, place))
    except Exception as error:
        fault = error

    replaced = parts_named_by(path) if own == 0 else ()

    def tidy() -> None:
        """Removes the parts that are not named; process 0 alone knows whether they may be."""
        remove({*replaced, *new} - {*parts_named_by(path)})

    def commit(faults: Sequence[str]) -> str:
        if fault is not None:
            raise fault
        for process, told in enumerate(faults):
            if told:
                raise RuntimeError(f"process {process} could not write its part: {told}")
        for k, owner in enumerate(owners):
            _check_written(new[k], Part(run, k), owner)
        records = tuple(_record(name, values[name], plans[name], owners) for name in values)
        document = Parts(Versions(__version__, **_jax.versions()), run, names, records)
        write_container(path, {}, document)
        tidy()
        return run

    told = "" if fault is None else f"{type(fault).__name__}: {fault}"
    try:
        agree(f"{topic}, run {run}", told, timeout, commit)
    except RuntimeError as error:
        raise fault or error from None
    finally:
        if own == 0:
            tidy()  # where it failed, or some were late; or the folder could not be flushed


def _record(
    name: str, value: Any, plan: Mapping[Bounds, int], owners: Sequence[int]
) -> ArrayRecord:
    return ArrayRecord(
        name,
        np.dtype(value.dtype).name,
        tuple(value.shape),
        placement_of(value.sharding),
        tuple(PieceRecord(owners.index(k), bounds) for bounds, k in sorted(plan.items())),
    )


def _check_written(path: str, part: Part, process: int) -> None:
    """Raises where a part is not to be seen here that its process has written."""
    try:
        _open_part(path, part)
    except (OSError, ArtefactError) as error:
        folder, name = os.path.split(path)
        raise RuntimeError(
            f"process {process} wrote {name}, and process 0 does not find it in {folder}, which "
            f"has to be one folder for all of them: {error}"
        ) from error


def _plan(value: Any) -> dict[Bounds, int]:
    """The process that writes each piece of an array, the same on all of them.

    Of a piece that several hold one writes it, another for each, so that all have as much to do.
    """
    if value.is_fully_addressable:
        return {bounds_of_all(value.shape): 0}
    holders: dict[Bounds, set[int]] = {}
    for device, index in value.sharding.devices_indices_map(value.shape).items():
        holders.setdefault(bounds_of(index, value.shape), set()).add(device.process_index)
    return {
        bounds: sorted(processes)[k % len(processes)]
        for k, (bounds, processes) in enumerate(sorted(holders.items()))
    }


def _own_pieces(
    values: Mapping[str, Any], plans: Mapping[str, dict[Bounds, int]], own: int
) -> dict[str, Array]:
    """What this process writes, by the names that the pieces have in its part."""
    found: dict[str, Array] = {}
    for name, value in values.items():
        mine = {bounds for bounds, owner in plans[name].items() if owner == own}
        if mine and value.is_fully_addressable:
            (bounds,) = mine
            found[_piece_name(name, bounds)] = np.asarray(value)
            continue
        for shard in value.addressable_shards if mine else ():
            bounds = bounds_of(shard.index, value.shape)
            if bounds in mine:
                found[_piece_name(name, bounds)] = np.asarray(shard.data)
    return found


def _piece_name(name: str, bounds: Bounds) -> str:
    """What a piece is called in its part, as NumPy would cut it out: ``0.weight[0:2,4:8]``."""
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in bounds)}]"


def _part_name(path: str, run: str, part: int, count: int) -> str:
    stem, suffix = os.path.splitext(os.path.basename(path))
    return f"{stem}.{run}.{part}-of-{count}{suffix}"


def _summary(value: Any, plan: Mapping[Bounds, int]) -> int:
    """Other where processes would save other things: of what each holds for itself, its bytes."""
    text = f"{value.dtype} {value.shape} {sorted(plan.items())}".encode()
    own = np.asarray(value).tobytes() if value.is_fully_addressable else b""
    return zlib.crc32(own, zlib.crc32(text))


def _new_run(topic: str, said: Sequence[str]) -> str:
    """The number of a run, if all processes want to save the same."""
    first, *others = map(json.loads, said)
    for process, other in enumerate(others, 1):
        if other == first:
            continue
        names = [repr(name) for name in {**first, **other} if first.get(name) != other.get(name)]
        raise ValueError(
            f"{topic}: processes 0 and {process} want to save different things: "
            f"{some(names, 5) or 'another order'}. All have to have the same Variables; one that "
            "each holds for itself, on its own devices, has to have the same value on all of them"
        )
    return secrets.token_hex(4)


def remove(paths: Iterable[str]) -> None:
    """Removes files that nothing names any more."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def parts_named_by(path: str) -> tuple[str, ...]:
    """The parts that belong to a file, if it is one that names parts and can be read."""
    with contextlib.suppress(OSError, ArtefactError):
        container = Container(path)
        if not container.tensors:
            return _beside(path, _read_index(container).parts)
    return ()


def _beside(path: str, names: Sequence[str]) -> tuple[str, ...]:
    """The files of these names in the folder of another one."""
    folder = os.path.dirname(os.path.abspath(path))
    return tuple(os.path.join(folder, name) for name in names)


# ------------------------------------------------------------------------------------------ read


def names_parts(arrays: Iterable[str]) -> bool:
    """Whether a file with these arrays is one that names parts: it has none of its own."""
    return set(arrays) == {SEAL}


def read_parts(path: str) -> dict[str, StoredArray]:
    """The arrays of a file that names parts. All of them are there; what they hold is compared
    with its checksum when it is read.

    Raises:
        ArtefactError: a file is damaged, missing, or belongs to another run; it is named.
    """
    folder = os.path.dirname(os.path.abspath(path))
    index = _read_index(Container(path))
    while missing := sorted(set(index.parts) - set(os.listdir(folder))):
        again = _read_index(Container(path))
        if again.run == index.run:
            raise ArtefactError(
                "file",
                f"it names parts that are not beside it: {some(missing, 5)}. Parts are moved and "
                "copied together with it",
            )
        index = again  # all was replaced meanwhile

    @functools.cache
    def part(place: int) -> Container:
        return _open_part(os.path.join(folder, index.parts[place]), Part(index.run, place))

    return {record.name: _stored(record, part) for record in index.arrays}


def _open_part(path: str, part: Part) -> Container:
    """A part, if it is the one that it should be."""
    with naming(path):
        container = Container(path)
        found = documents.parse(Part, container.manifest, MANIFEST)
        if found.run != part.run:
            raise ArtefactError(
                MANIFEST, f"it is a part of the run {found.run}, and should be one of {part.run}"
            )
        if found != part:
            reason = f"it is the part {found.part}, and should be the part {part.part}"
            raise ArtefactError(MANIFEST, reason)
        return container


def _read_index(container: Container) -> Parts:
    index = documents.parse(Parts, container.manifest, MANIFEST)
    for name in index.parts:
        if os.path.basename(name) != name or name in {"", os.curdir, os.pardir}:
            raise ArtefactError(MANIFEST, f"{documents.show(name)} is not the name of a file")
    for record in index.arrays:
        where = f"the array {documents.show(record.name)}"
        if dtype_named(record.dtype) is None:
            raise ArtefactError(MANIFEST, f"{where} has the dtype {documents.show(record.dtype)}")
        size = 0
        for each in record.pieces:
            fits = len(each.bounds) == len(record.shape) and all(
                start <= stop <= length for (start, stop), length in zip(each.bounds, record.shape)
            )
            if each.part >= len(index.parts) or not fits:
                reason = f"{where} has a piece outside of its shape, or in no part"
                raise ArtefactError(MANIFEST, reason)
            size += volume(each.bounds)
        if size != math.prod(record.shape):
            reason = f"{where} has {math.prod(record.shape)} elements, its pieces {size}"
            raise ArtefactError(MANIFEST, reason)
    check_unique([record.name for record in index.arrays], "arrays")
    return index


def _stored(record: ArrayRecord, part: Callable[[int], Container]) -> StoredArray:
    dtype = dtype_named(record.dtype)
    assert dtype is not None, "it was looked up when the file was read"

    def read(each: PieceRecord) -> Array:
        container, name = part(each.part), _piece_name(record.name, each.bounds)
        shape = tuple(stop - start for start, stop in each.bounds)
        with naming(container.path):
            array = container.array(name)
            if array.dtype != dtype or array.shape != shape:
                found = f"{array.dtype}{list(array.shape)}"
                reason = f"it is {found}, and by the file that names it {dtype}{list(shape)}"
                raise ArtefactError(name, reason)
        return array

    pieces = [Piece(each.bounds, functools.partial(read, each)) for each in record.pieces]
    return StoredArray(dtype, record.shape, record.placement, pieces)
