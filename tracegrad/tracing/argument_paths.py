"""The paths of traced arrays in the arguments of the functions that are being traced."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tracegrad import _jax


class _KnownPaths(threading.local):
    paths: Mapping[int, str] = {}  # by the array's id


_known_paths = _KnownPaths()


@contextmanager
def known_by_path(arrays: Sequence[Any], paths: Sequence[str]) -> Iterator[None]:
    """A block in which `argument_path` returns the paths of these arrays; the caller keeps the
    arrays alive."""
    before = _known_paths.paths
    _known_paths.paths = {**before, **dict(zip(map(id, arrays), paths, strict=True))}
    try:
        yield
    finally:
        _known_paths.paths = before


def argument_path(array: Any) -> str:
    """Returns the path of an argument of a function being traced, ``params.0.kernel``, also for a
    tracer of a derivative or of `jax.vmap` that stands for an argument; "" for any other array."""
    known = _known_paths.paths
    return known.get(id(_chain_to_argument(array)[-1]), "") if known else ""


def known_paths(arrays: Sequence[Any], otherwise: Sequence[str]) -> Sequence[str]:
    """The `argument_path` of each array, or the path in `otherwise`."""
    if not _known_paths.paths:
        return otherwise
    return [argument_path(x) or path for x, path in zip(arrays, otherwise, strict=True)]


def derivatives_of_argument(array: Any) -> list[Any]:
    """If an array stands for an argument, returns a tracer for each derivative that is being taken
    with respect to the argument, the innermost first."""
    *tracers, argument = _chain_to_argument(array)
    if id(argument) not in _known_paths.paths:
        return []
    return [each for each in tracers if _jax.primal_of(each) is not None]


def _chain_to_argument(array: Any) -> list[Any]:
    """Returns an array, the array that it stands for, and so on, up to a known argument."""
    found = [array]
    while id(array) not in _known_paths.paths:
        primal = _jax.primal_of(array)
        array = _jax.mapped_of(array) if primal is None else primal
        if array is None:
            break
        found.append(array)
    return found
