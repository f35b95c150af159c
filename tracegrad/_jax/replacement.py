"""Functions of JAX in whose places others stand for as long as somebody needs them there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


class Replacement:
    """Puts functions into the places of some of a module's.

    On all threads: what stands there does as the original, unless what is asked for holds of the
    thread that calls it. Who has imported the original by name has the original.

    Args:
      module: where they stand.
      make: by the name of each what makes, of the original, the function for its place.
    """

    def __init__(self, module: ModuleType, make: Mapping[str, Callable[[Function], Function]]):
        self._module = module
        self._make = make
        self._lock = threading.Lock()
        self._needed_by = 0
        self._originals: dict[str, Function] = {}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with self._lock:
            if not self._needed_by:
                self._originals = {name: getattr(self._module, name) for name in self._make}
                for name, original in self._originals.items():
                    setattr(self._module, name, self._make[name](original))
            self._needed_by += 1
        try:
            yield
        finally:
            with self._lock:
                self._needed_by -= 1
                if not self._needed_by:
                    for name, original in self._originals.items():
                        setattr(self._module, name, original)
