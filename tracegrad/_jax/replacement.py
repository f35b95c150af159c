"""Replaces functions and settings of the process; restores the originals after the last user."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax

Function = Callable[..., Any]
# The module or class that owns the function, the name of the function, and a callable that takes
# the original and returns the replacement. If a class inherits the function, the replacement is
# set on the class itself. Descriptors, such as slots of a class, count as functions.
ReplacedPlace = tuple[Any, str, Callable[[Function], Any]]

_INHERITED: Any = object()


def _set_functions(functions: Mapping[tuple[Any, str], Any]) -> None:
    # `type`'s own methods, because a metaclass may forbid setting and deleting attributes.
    for (owner, name), function in functions.items():
        if function is _INHERITED:
            (type.__delattr__ if isinstance(owner, type) else delattr)(owner, name)
        else:
            (type.__setattr__ if isinstance(owner, type) else setattr)(owner, name, function)


class Replacement:
    """Replaces functions of modules and classes, and counts the users of the replacements.

    All threads see a replacement, so it has to behave like the original on threads without a user.
    Code that imported the original by name still calls the original. If two users replace the same
    function, the first replacement stays. After the last user, all originals are back.

    Args:
      read: returns the function of an owner and a name.
      write: sets functions, given by their owners and names.
    """

    def __init__(
        self,
        read: Callable[[Any, str], Any] = lambda owner, name: vars(owner).get(name, _INHERITED),
        write: Callable[[Mapping[tuple[Any, str], Any]], None] = _set_functions,
    ) -> None:
        self._read, self._write = read, write
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
                    original = originals[owner, name] = self._read(owner, name)
                    is_inherited = original is _INHERITED
                    new[owner, name] = make(getattr(owner, name) if is_inherited else original)
            self._originals |= originals
            self._write(new)
            self._user_count += 1

    def put_back(self) -> None:
        """Counts one user less; after the last user, restores the originals."""
        with self._lock:
            self._user_count -= 1
            if not self._user_count:
                self._write(self._originals)
                self._originals.clear()


def settings(
    values: Mapping[str, Any], *, unless_set: bool = False
) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context manager that changes settings of `jax.config`, which all threads share.

    Args:
      values: the value of each setting.
      unless_set: whether a setting keeps a value that the user gave it.
    """

    def place(name: str, value: Any) -> ReplacedPlace:
        return jax.config, name, lambda old: old if unless_set and old is not None else value

    def update(settings: Mapping[tuple[Any, str], Any]) -> None:
        for (config, name), value in settings.items():
            config.update(name, value)

    replacement = Replacement(getattr, update)
    return functools.partial(replacement.in_place, [place(*each) for each in values.items()])
