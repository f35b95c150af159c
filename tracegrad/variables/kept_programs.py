"""Keeps JAX from reusing the program of an inner function that has read an old value of a Variable.

JAX caches the programs of inner functions (the bodies of loops, nested jits) by the function, and
does not run the function again. If such a function has read a Variable, the value is a constant of
the cached program. So while a function is traced, a key of ours is part of JAX's cache key. Once an
inner function has read a Variable under the key, the key is replaced as soon as a read may give
another value: JAX then runs inner functions again. If inner functions read no Variables, all traces
of a thread have the same key, and share JAX's cached programs. Until the first Variable is made,
there is no key.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tracegrad import _jax

_key_of_jax = _jax.user_context()


class _Key:
    is_used = False  # whether an inner function has read a Variable under this key


class _Process:
    has_variables = False


class _Trace:
    """A function that is being traced: JAX's trace, and the keys so far; the last one is valid."""

    def __init__(self, trace: Any, keys: ExitStack):
        self.trace = trace
        self._keys = keys
        self.key = _Key()

    def put(self, key: _Key) -> None:
        self.key = key
        self._keys.enter_context(_key_of_jax(key))


class _Thread(threading.local):
    def __init__(self) -> None:
        self.traces: list[_Trace] = []  # outermost first
        self.unused = _Key()


_thread = _Thread()


def begin() -> None:
    """Call this when a Variable is made: running traces get a key."""
    if not _Process.has_variables:
        _Process.has_variables = True
        for trace in _thread.traces:
            trace.put(_Key())


@contextmanager
def while_tracing() -> Iterator[None]:
    """A block in which the function that is being traced is called; another listener listens in it,
    so that reads change before and after."""
    traces = _thread.traces
    if _thread.unused.is_used:
        _thread.unused = _Key()
    try:
        with ExitStack() as keys:
            traces.append(_Trace(_jax.current_trace(None), keys))
            if _Process.has_variables:
                traces[-1].put(_thread.unused)
            yield
    finally:
        traces.pop()


def is_tracing() -> bool:
    """Whether a function is being traced, so that inner functions may read Variables."""
    return bool(_thread.traces)


def note_read() -> None:
    """Call this for each read that has a listener: marks the key as used by inner functions."""
    if _thread.traces:
        innermost = _thread.traces[-1]
        here = _jax.current_trace(None)
        if here is not innermost.trace and _jax.staging_trace() is not innermost.trace:
            innermost.key.is_used = True


def reads_change() -> None:
    """Call this when the next read of a Variable may give another value, or must reach another
    listener."""
    if _thread.traces and _thread.traces[-1].key.is_used:
        _thread.traces[-1].put(_Key())


@contextmanager
def for_all_values() -> Iterator[None]:
    """A block for the call of a program that takes the values of Variables as arguments: JAX may
    reuse it for other values, so the key does not apply."""
    around = _thread.traces[-1] if _thread.traces else None
    key = None if around is None else around.key
    try:
        with _key_of_jax(()):
            yield
    finally:
        if around is not None and around.key is not key:  # the key was replaced inside the block
            around.put(around.key)
