"""An array as a file has it, whole or in pieces, and how it gets onto devices from there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tracegrad.saving.placement import Placement
from tracegrad.saving.tensors import Array

Bounds = tuple[tuple[int, int], ...]
"""From where to where along each axis."""


@dataclass(frozen=True)
class Piece:
    """A part of an array; `read` gives it, and checks it first."""

    bounds: Bounds
    read: Callable[[], Array]


@dataclass(frozen=True)
class StoredArray:
    """An array in files: its pieces cover it, and do not overlap."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    placement: Placement | None
    pieces: Sequence[Piece]

    @classmethod
    def of(cls, array: Array, placement: Placement | None = None) -> StoredArray:
        """An array that is in one file, whole."""
        pieces = [Piece(bounds_of_all(array.shape), lambda: array)]
        return cls(array.dtype, array.shape, placement, pieces)

    def cut(self, bounds: Bounds) -> Array:
        """What lies within these bounds; only the pieces that have some of it are read. Not copied
        where that is one of them."""
        for piece in self.pieces:
            if piece.bounds == bounds:
                return piece.read()
        found = np.empty([stop - start for start, stop in bounds], self.dtype)
        for piece in self.pieces:
            common = [
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, piece.bounds, strict=True)
            ]
            if all(start < stop for start, stop in common):
                into = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, bounds))
                of = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, piece.bounds))
                found[into] = piece.read()[of]
        return found

    def on(self, sharding: Any, what: str) -> Any:
        """A `jax.Array` of it that is split in this way; this process reads what its devices get.

        Raises ValueError where `what`, that is this, cannot be split so.
        """
        # With a buffer of its own: files can change under the map of their bytes, and that of a
        # Variable may be donated.
        put = functools.partial(jax.device_put, may_alias=False)
        if sharding is None:
            return put(self.cut(bounds_of_all(self.shape)))
        try:
            sharding.shard_shape(self.shape)
        except ValueError as error:
            raise ValueError(f"{what} cannot be split as {sharding}: {error}") from error
        cuts: dict[Bounds, Array] = {}
        shards = []
        for device, index in sharding.addressable_devices_indices_map(self.shape).items():
            bounds = bounds_of(index, self.shape)
            if bounds not in cuts:
                cuts[bounds] = self.cut(bounds)
            shards.append(put(cuts[bounds], device))
        return jax.make_array_from_single_device_arrays(
            self.shape, sharding, shards, dtype=self.dtype
        )


def bounds_of_all(shape: Sequence[int]) -> Bounds:
    """Those of a whole array."""
    return tuple((0, size) for size in shape)


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    """A part of an array of this shape, given as JAX gives it."""
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def volume(bounds: Bounds) -> int:
    """How many elements lie within them."""
    return math.prod(stop - start for start, stop in bounds)
