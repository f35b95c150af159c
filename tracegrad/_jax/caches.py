"""Caches: bounded tables that `clear_caches` empties.

Every cache of the package is one of these classes. A table that must not lose entries (registered
names, objects in use) is not a cache.

The caches have no locks: each operation on a dict is atomic. If two threads miss at the same time,
both compute the value, and the cache keeps one of the two values.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, ParamSpec, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
P = ParamSpec("P")

# One function for each cache; modules add theirs when they are imported.
_clear_functions: list[Callable[[], object]] = []


def clear_caches() -> None:
    """Empties the caches of this package.

    The caches hold facts about functions, programs and types, and the programs that tapes have
    compiled. Clearing changes no result, only time: entries that are needed again are computed,
    traced and compiled again. Records of open tapes, Variables and registered gradients are kept.

    Clearing is never necessary: each cache is bounded, and the entries of a function or program end
    with the function or program. Clearing frees memory between two experiments in one process, or
    lets a measurement start without caches.

    JAX's own caches are not emptied, because all other code in the process uses them too. To start
    without any cache, also call `jax.clear_caches`. A traced function keeps the programs that it
    has compiled: `TracedFunction.clear_cache` removes the programs of one function,
    `jax.clear_caches` the programs of all functions.

    >>> import jax, tracegrad as tg
    >>> def slope(x):
    ...     with tg.GradientTape() as tape:
    ...         tape.watch(x)
    ...         y = x**2
    ...     return float(tape.gradient(y, x))
    >>> slope(jax.numpy.float32(3.0))
    6.0
    >>> tg.clear_caches()
    >>> slope(jax.numpy.float32(3.0))
    6.0
    """
    for clear in _clear_functions:
        clear()


def when_clearing(clear: Callable[[], object]) -> Callable[[], object]:
    """Registers a function for `clear_caches` to call."""
    _clear_functions.append(clear)
    return clear


def cached(maxsize: int) -> Callable[[Callable[P, V]], Callable[P, V]]:
    """Decorates a function: caches its latest results (`functools.lru_cache`). 1 and 1.0 are
    different keys.

    The cache keeps the arguments alive: for functions, programs or arrays, use `WeakCache`.
    """

    def decorate(fun: Callable[P, V]) -> Callable[P, V]:
        cached_fun = functools.lru_cache(maxsize, typed=True)(fun)
        when_clearing(cached_fun.cache_clear)
        return cached_fun  # type: ignore[return-value]  # typeshed omits the arguments

    return decorate


def once_for_each(find: Callable[P, V]) -> Callable[P, V]:
    """Decorates a method to run once for equal arguments; the object keeps the results. Arguments
    are hashable, or lists of hashable elements."""
    name = f"_results_of_{find.__name__}"

    @functools.wraps(find)
    def find_once(*args: P.args, **kwargs: P.kwargs) -> V:
        owner, *rest = args
        results: dict[Any, V] = vars(owner).setdefault(name, {})
        key = tuple([tuple(x) if type(x) is list else x for x in (*rest, *kwargs.items())])
        if key not in results:
            results[key] = find(*args, **kwargs)
        return results[key]

    return find_once


class Cache(dict[K, V]):
    """A global dict of at most `maxsize` entries: a further entry replaces the oldest entry.

    The oldest entry is the entry that was added first, even if it is in use. So a hit costs as much
    as in a dict, and an entry in constant use is computed again once in `maxsize` misses.
    """

    def __init__(self, maxsize: int):
        self._maxsize = maxsize
        when_clearing(self.clear)

    def put(self, key: K, value: V) -> V:
        """Adds a value, unless another thread has added one; returns the value in the cache."""
        if len(self) >= self._maxsize and key not in self:
            _drop_oldest(self)
        return self.setdefault(key, value)


class WeakCache(Generic[V]):
    """A global table whose keys are functions or programs; an entry ends with its key.

    Keys are compared by identity, since equal functions (objects with an `__eq__`) may do different
    things. A value that refers to its key keeps the key alive until `maxsize` newer entries follow.
    """

    def __init__(self, maxsize: int = 1 << 14):
        self._maxsize = maxsize
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}
        when_clearing(self._entries.clear)

    def get(self, owner: Any) -> V | None:
        entry = self._entries.get(id(owner))
        return None if entry is None else entry[1]

    def put(self, owner: Any, value: V) -> V:
        """Sets the entry of a key, and returns `value`. Raises TypeError if `owner` does not
        support weak references."""
        identity, entries = id(owner), self._entries
        # When `owner` is freed, its entry is removed, before another object can have its identity.
        ref = weakref.ref(owner, lambda _: entries.pop(identity, None) and None)
        if len(entries) >= self._maxsize and identity not in entries:
            _drop_oldest(entries)
        entries[identity] = ref, value
        return value

    def values(self) -> list[V]:
        return [value for _, value in list(self._entries.values())]


def _drop_oldest(entries: dict[Any, Any]) -> None:
    # Another thread, or the end of an object, may remove an entry in the meantime.
    with contextlib.suppress(KeyError, RuntimeError, StopIteration):
        del entries[next(iter(entries))]


# ------------------------------------------------------------- facts of functions and programs

# Keyed by identity. With this cache, recursions over nested programs visit each inner program once
# for all its calls; else their time is exponential in the depth of calls. A function that is traced
# for each call takes 0.3 ms with the cache and 70 ms without.
_facts: WeakCache[dict[Any, Any]] = WeakCache()


def facts_of(owner: Any) -> dict[Any, Any]:
    """Returns the dict of cached facts about a function, a program or another object. The dict ends
    with the object; no fact may refer to the object.

    Raises TypeError if the object does not support weak references.
    """
    facts = _facts.get(owner)
    return _facts.put(owner, {}) if facts is None else facts


def of_program(find: Callable[[Any], V]) -> Callable[[Any], V]:
    """Decorates a function of one program (or of another immutable object) to run once for each
    program, while the program lives. The result must not refer to the program."""

    entries = _facts._entries

    @functools.wraps(find)
    def fact(program: Any) -> V:
        entry = entries.get(id(program))  # inlines `WeakCache.get`, for fast hits
        facts = _facts.put(program, {}) if entry is None else entry[1]
        try:
            return facts[find]  # type: ignore[no-any-return]
        except KeyError:
            return facts.setdefault(find, find(program))  # type: ignore[no-any-return]

    return fact
