"""Replaces functions of modules and classes for as long as somebody needs that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Function = Callable[..., Any]
# The module or class that has the function, its name there, and what makes, of the original, the
# function for its place. What a class inherits is put into the class itself; a descriptor, such as
# a slot of a class, is a function here too.
Place = tuple[Any, str, Callable[[Function], Any]]

_INHERITED: Any = object()


class Replacement:
    """Puts functions into the places of those of modules and classes.

    On all threads: what stands there does as the original, unless what is asked for holds of the
    thread that calls it. Who has imported the original by name has the original. All are put back
    when nobody needs any of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._needed_by = 0
        self._originals: dict[tuple[Any, str], Function] = {}

    @contextmanager
    def in_place(self, places: Iterable[Place]) -> Iterator[None]:
        """For a block, which needs them all."""
        self.put(places)
        try:
            yield
        finally:
            self.put_back()

    def put(self, places: Iterable[Place]) -> None:
        """Puts them in place for one more user, until that calls `put_back`."""
        with self._lock:
            new: dict[tuple[Any, str], Function] = {}
            for owner, name, make in places:
                if (owner, name) not in self._originals:
                    original = self._originals[owner, name] = vars(owner).get(name, _INHERITED)
                    inherited = original is _INHERITED
                    new[owner, name] = make(getattr(owner, name) if inherited else original)
            _put(new)
            self._needed_by += 1

    def put_back(self) -> None:
        """One user needs them no more; after the last one the originals are back."""
        with self._lock:
            self._needed_by -= 1
            if not self._needed_by:
                _put(self._originals)
                self._originals.clear()


def _put(functions: Mapping[tuple[Any, str], Function]) -> None:
    for (owner, name), function in functions.items():
        # A metaclass may forbid what is asked of `type` itself here.
        if function is _INHERITED:
            (type.__delattr__ if isinstance(owner, type) else delattr)(owner, name)
        else:
            (type.__setattr__ if isinstance(owner, type) else setattr)(owner, name, function)
