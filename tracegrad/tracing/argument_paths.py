"""By which path an argument of the function that is being traced is known."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tracegrad.variables.leaves import Leaf


class _Here(threading.local):
    paths: Mapping[int, str] = {}  # by the array's id


_here = _Here()


@contextmanager
def known_by_path(arrays: Sequence[Any], leaves: Sequence[Leaf]) -> Iterator[None]:
    """A block in which `argument_path` knows these arrays, which the caller holds."""
    before = _here.paths
    named = zip(arrays, leaves, strict=True)
    _here.paths = {**before, **{id(array): leaf.name for array, leaf in named}}
    try:
        yield
    finally:
        _here.paths = before


def argument_path(array: Any) -> str:
    """``params.0.kernel``; "" for what is no argument of a function that is being traced."""
    return _here.paths.get(id(array), "")
