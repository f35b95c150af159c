"""By which path an argument of the function that is being traced is known."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tracegrad import _jax


class _Here(threading.local):
    paths: Mapping[int, str] = {}  # by the array's id


_here = _Here()


@contextmanager
def known_by_path(arrays: Sequence[Any], paths: Sequence[str]) -> Iterator[None]:
    """A block in which `argument_path` knows these arrays, which the caller holds."""
    before = _here.paths
    _here.paths = {**before, **dict(zip(map(id, arrays), paths, strict=True))}
    try:
        yield
    finally:
        _here.paths = before


def argument_path(array: Any) -> str:
    """``params.0.kernel``; "" for what is no argument of a function that is being traced, or such
    an argument as a function around gets it that is being differentiated."""
    while array is not None:
        if id(array) in _here.paths:
            return _here.paths[id(array)]
        array = _jax.primal_of(array)
    return ""
