"""What can be changed in an object, as it is now: by which two calls with the same one differ."""

from __future__ import annotations

import copy
from collections import deque
from types import FunctionType, NoneType
from typing import Any

import jax
import numpy as np

# Asked of at each call: of settings with more parts, those that come first are looked into, and of
# an array with more bytes it is told only that it is the same one.
_MOST_PARTS = 10_000
_MOST_BYTES = 1 << 20
_MOST_DEEP = 16

_COPIED = (set, bytearray)
_UNCHANGED = frozenset({bool, int, float, complex, str, bytes, NoneType, type, FunctionType})


class Snapshot:
    """The attributes and the entries of an object without a hash, and of such in it.

    What has a hash is taken as it is, so is an array of JAX. Two snapshots are the same (`is_same`)
    if their parts are, each by type and value.
    """

    __slots__ = ("kind", "names", "parts")

    def __init__(self, value: Any, names: list[Any], parts: list[Any]):
        self.kind, self.names, self.parts = type(value), names, parts

    def __repr__(self) -> str:
        if issubclass(self.kind, dict):
            return repr(dict(zip(self.names, self.parts, strict=True)))
        if issubclass(self.kind, (list, tuple, deque)):
            return repr(self.parts)
        parts = (f"{name}={part!r}" for name, part in zip(self.names, self.parts, strict=True))
        return f"{self.kind.__name__}({', '.join(parts)})"


def snapshot(value: Any) -> Any:
    """An object that has no hash as it is now."""
    return _Look().at(value, _MOST_DEEP)


class _Look:
    """Through an object and what is in it. (No function that calls itself: that is a cycle, left
    behind at each call.)"""

    def __init__(self) -> None:
        self.left = _MOST_PARTS
        self.opened: set[int] = set()

    def at(self, value: Any, depth: int) -> Any:
        if type(value) in _UNCHANGED or isinstance(value, jax.Array) or _has_hash(value):
            return value
        if isinstance(value, _COPIED):
            return copy.copy(value)
        if isinstance(value, np.ndarray):
            return value.copy() if value.nbytes <= _MOST_BYTES else value
        if id(value) in self.opened or not depth:
            return value
        self.opened.add(id(value))
        names, parts = _parts(value)
        self.left -= len(parts)
        if self.left >= 0:
            parts = [self.at(part, depth - 1) for part in parts]
        return Snapshot(value, names, parts)


def _parts(value: Any) -> tuple[list[Any], list[Any]]:
    """The names of the attributes and the keys of an object; their values, and its entries."""
    attributes: Any = object.__getstate__(value)  # a dictionary, or a pair with that of the slots
    named: dict[Any, Any] = {}
    for some in attributes if isinstance(attributes, tuple) else (attributes,):
        named.update(some or {})
    if isinstance(value, dict):
        return [*named, *value], [*named.values(), *value.values()]
    entries = value if isinstance(value, (list, tuple, deque)) else ()
    return [*named], [*named.values(), *entries]


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def is_same(one: Any, other: Any) -> bool:
    """Whether two objects, or snapshots of them, are of one type and equal."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Snapshot):
        return (
            one.kind is other.kind
            and len(one.parts) == len(other.parts)
            and len(one.names) == len(other.names)
            and all(map(is_same, one.names, other.names))
            and all(map(is_same, one.parts, other.parts))
        )
    if isinstance(one, (float, complex)):  # 0.0 == -0.0, nan != nan
        return repr(one) == repr(other)
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(one.tobytes() == other.tobytes())
    try:
        return bool(one == other)
    except Exception:  # each is comparable with itself, and that is how it is known
        return False
