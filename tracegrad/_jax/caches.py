"""Caches: bounded tables that `clear_caches` empties.

Every table of the package in which something is looked up again is one of these. What must not be
forgotten (what is registered by a name, what is in use) is no cache, and is kept elsewhere.

None of them locks: each step on a dict is one step for all threads. Two threads that miss at once
both find the answer, and one of them is kept.
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

_clearing: list[Callable[[], object]] = []  # one for each cache; added to by modules as they load


def clear_caches() -> None:
    """Forgets what this package remembers from one call to the next.

    That is what it has found out about functions, programs and types, and the programs that tapes
    have compiled. Nothing changes but time: what is needed again is found, traced and compiled
    again. What open tapes have recorded stays, and so do Variables and registered gradients.

    Nobody has to call it: each of these tables is bounded, and what belongs to a function or a
    program goes with it. It gives memory back between two experiments in one process, or makes a
    measurement start from nothing.

    JAX's own caches are left alone, for they serve everything else in the process too;
    `jax.clear_caches` empties those, not these. Call both to start from nothing. What one traced
    function has compiled is kept as long as the function is: `TracedFunction.clear_cache` forgets
    that alone, `jax.clear_caches` that of all.

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
    for clear in _clearing:
        clear()


def when_clearing(clear: Callable[[], object]) -> Callable[[], object]:
    """Has `clear_caches` call a function: for an object that holds entries of a cache."""
    _clearing.append(clear)
    return clear


def cached(maxsize: int) -> Callable[[Callable[P, V]], Callable[P, V]]:
    """A function of plain values that remembers its latest results (`functools.lru_cache`). 1 and
    1.0 are two keys.

    A function of functions, programs or arrays would keep these alive: use `WeakCache` for it.
    """

    def decorate(fun: Callable[P, V]) -> Callable[P, V]:
        remembering = functools.lru_cache(maxsize, typed=True)(fun)
        when_clearing(remembering.cache_clear)
        return remembering  # type: ignore[return-value]  # typeshed has no arguments there

    return decorate


def once_for_each(find: Callable[P, V]) -> Callable[P, V]:
    """A method that is run once for the same arguments, as long as its object lives. Lists count by
    what is in them, everything else has a hash."""
    name = f"_found_by_{find.__name__}"

    @functools.wraps(find)
    def once(*args: P.args, **kwargs: P.kwargs) -> V:
        owner, *given = args
        found: dict[Any, V] = vars(owner).setdefault(name, {})
        key = tuple([tuple(x) if type(x) is list else x for x in (*given, *kwargs.items())])
        if key not in found:
            found[key] = find(*args, **kwargs)
        return found[key]

    return once


class Cache(dict[K, V]):
    """A dict of a module that drops the oldest of more than `maxsize` entries.

    The oldest is what was put in first, used or not: so a hit is that of a dict, and what is in
    use all the time is found anew once in `maxsize` misses.
    """

    def __init__(self, maxsize: int):
        self._maxsize = maxsize
        when_clearing(self.clear)

    def put(self, key: K, value: V) -> V:
        """Keeps a value, unless there is one from another thread; returns the one that is kept."""
        if len(self) >= self._maxsize and key not in self:
            _drop_oldest(self)
        return self.setdefault(key, value)


class WeakCache(Generic[V]):
    """A table of a module by the identity of functions or programs, as long as they live.

    By identity, since functions that are equal (objects with an `__eq__`) may do different things.
    A value that holds its key keeps that alive, until `maxsize` others have come after it.
    """

    def __init__(self, maxsize: int = 1 << 14):
        self._maxsize = maxsize
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}
        when_clearing(self._entries.clear)

    def get(self, owner: Any) -> V | None:
        """What is remembered of `owner`; None if nothing is."""
        entry = self._entries.get(id(owner))
        return None if entry is None else entry[1]

    def put(self, owner: Any, value: V) -> V:
        """Remembers `value` in the place of what was remembered before; returns it.

        Raises TypeError if there are no weak references to `owner`.
        """
        identity, entries = id(owner), self._entries
        # Whenever the owner goes, its entry does, before another object can have its identity.
        ref = weakref.ref(owner, lambda _: entries.pop(identity, None) and None)
        if len(entries) >= self._maxsize and identity not in entries:
            _drop_oldest(entries)
        entries[identity] = ref, value
        return value

    def forget(self, unwanted: Callable[[V], bool]) -> None:
        """Removes the entries whose values are unwanted."""
        for identity, (_, value) in list(self._entries.items()):
            if unwanted(value):
                self._entries.pop(identity, None)

    def values(self) -> list[V]:
        """What is remembered."""
        return [value for _, value in list(self._entries.values())]


def _drop_oldest(entries: dict[Any, Any]) -> None:
    # Another thread, or the end of an object, may make room meanwhile.
    with contextlib.suppress(KeyError, RuntimeError, StopIteration):
        del entries[next(iter(entries))]


# ------------------------------------------------------------- facts of functions and programs

# By what each is. Recursions over nested programs ask for each inner one once, however often it is
# called: without it they take time exponential in the depth of calls. And a function that is traced
# anew for each call takes 0.3 ms with it and 70 ms without.
_facts: WeakCache[dict[Any, Any]] = WeakCache()


def facts_of(owner: Any) -> dict[Any, Any]:
    """What is remembered of a function, a program or another object, as long as it lives; nothing
    that holds it.

    Raises TypeError if there are no weak references to it.
    """
    known = _facts.get(owner)
    return _facts.put(owner, {}) if known is None else known


def of_program(find: Callable[[Any], V]) -> Callable[[Any], V]:
    """A function of a program (or of another object that nobody changes) alone, which is run once
    for each as long as it lives. What it returns does not hold the program."""

    entries = _facts._entries

    @functools.wraps(find)
    def fact(program: Any) -> V:
        entry = entries.get(id(program))  # as `WeakCache.get`: hits are many
        facts = _facts.put(program, {}) if entry is None else entry[1]
        try:
            return facts[find]  # type: ignore[no-any-return]
        except KeyError:
            return facts.setdefault(find, find(program))  # type: ignore[no-any-return]

    return fact
