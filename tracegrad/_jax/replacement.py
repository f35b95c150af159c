"""Replaces functions and settings of the process; restores the originals after the last user."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

Function = Callable[..., Any]
# The module or class that owns the function, the name of the function, and a callable that takes
# the original and returns the replacement. If a class inherits the function, the replacement is
# set on the class itself. Descriptors, such as slots of a class, count as functions.
ReplacedPlace = tuple[Any, str, Callable[[Function], Any]]

_INHERITED: Any = object()


class Replacement:
    """Replaces functions of modules and classes, and counts the users of the replacements.

    All threads see a replacement, so it has to behave like the original on threads without a user.
    Code that imported the original by name still calls the original. If two users replace the same
    function, the first replacement stays. After the last user, all originals are back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._user_count = 0
        self._originals: dict[tuple[Any, str], Function] = {}

    @contextmanager
    def in_place(self, places: Iterable[ReplacedPlace]) -> Iterator[None]:
        """Replaces the functions in a block."""
        self.put(places)
        try:
            yield
        finally:
            self.put_back()

    def put(self, places: Iterable[ReplacedPlace]) -> None:
        """Replaces the functions for one more user, who has to call `put_back` once. If making a
        replacement raises, nothing is replaced, and no user is counted."""
        with self._lock:
            originals: dict[tuple[Any, str], Function] = {}
            new: dict[tuple[Any, str], Function] = {}
            for owner, name, make in places:
                if (owner, name) not in self._originals:
                    original = originals[owner, name] = vars(owner).get(name, _INHERITED)
                    is_inherited = original is _INHERITED
                    new[owner, name] = make(getattr(owner, name) if is_inherited else original)
            self._originals |= originals
            _set_functions(new)
            self._user_count += 1

    def put_back(self) -> None:
        """Counts one user less; after the last user, restores the originals."""
        with self._lock:
            self._user_count -= 1
            if not self._user_count:
                _set_functions(self._originals)
                self._originals.clear()


def _set_functions(functions: Mapping[tuple[Any, str], Function]) -> None:
    for (owner, name), function in functions.items():
        # `type`'s own methods, because a metaclass may forbid setting and deleting attributes.
        if function is _INHERITED:
            (type.__delattr__ if isinstance(owner, type) else delattr)(owner, name)
        else:
            (type.__setattr__ if isinstance(owner, type) else setattr)(owner, name, function)


class Settings:
    """Changes settings of `jax.config` while there are users; all threads share the settings.

    Args:
      values: the value of each setting.
      unless_set: whether a setting keeps a value that the user gave it.
    """

    def __init__(self, values: Mapping[str, Any], *, unless_set: bool = False):
        self._values = values
        self._unless_set = unless_set
        self._lock = threading.Lock()
        self._user_count = 0
        self._before: dict[str, Any] = {}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Changes the settings in a block."""
        with self._lock:
            if not self._user_count:
                before = {name: getattr(jax.config, name) for name in self._values}
                is_kept = {name for name in before if self._unless_set and before[name] is not None}
                self._before = {name: before[name] for name in before.keys() - is_kept}
                _configure({name: self._values[name] for name in self._before})
            self._user_count += 1
        try:
            yield
        finally:
            with self._lock:
                self._user_count -= 1
                if not self._user_count:
                    _configure(self._before)


def _configure(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
