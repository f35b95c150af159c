"""Keeps JAX from reusing the program of an inner function that has read an old value of a Variable.

JAX caches the programs of inner functions (the bodies of loops, nested jits) by the function, and
does not run the function again. If an inner function has read a Variable, the value is a constant
of the cached program. So while a function is traced, a key of this module is part of JAX's cache
key. Once an inner function has read a Variable under the key, a new key replaces it as soon as a
read may give another value: JAX then runs inner functions again. If inner functions read no
Variables, all traces of a thread have the same key, and share JAX's cached programs. Until the
first Variable is made, there is no key.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tracegrad import _jax

_key_of_jax = _jax.user_context()


class _Key:
    is_used = False  # whether an inner function has read a Variable under this key


class _Process:
    has_variables = False


@dataclass
class _Trace:
    """A function that is being traced.

    Attributes:
      trace: JAX's trace.
      keys: the contexts of its keys.
      key: the valid key, the last of several.
    """

    trace: Any
    keys: ExitStack
    key: _Key = field(default_factory=_Key)

    def put(self, key: _Key) -> None:
        self.key = key
        self.keys.enter_context(_key_of_jax(key))


class _Thread(threading.local):
    def __init__(self) -> None:
        self.traces: list[_Trace] = []  # outermost first
        self.unused = _Key()


_thread = _Thread()


def note_first_variable() -> None:
    """Gives running traces a key; called for each Variable that is made."""
    if not _Process.has_variables:
        _Process.has_variables = True
        for trace in _thread.traces:
            trace.put(_Key())


@contextmanager
def while_tracing() -> Iterator[None]:
    """A block for the call of the function that is being traced. Another listener listens in the
    block, so that reads change before and after."""
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
    """Whether inner functions may read Variables."""
    return bool(_thread.traces)


def note_read() -> None:
    """Marks the key as used if an inner function reads; called for each read with a listener."""
    if _thread.traces:
        innermost = _thread.traces[-1]
        here = _jax.current_trace(None)
        if here is not innermost.trace and _jax.staging_trace() is not innermost.trace:
            innermost.key.is_used = True


def note_reads_change() -> None:
    """Called when the next read of a Variable may give another value, or must reach another
    listener."""
    if _thread.traces and _thread.traces[-1].key.is_used:
        _thread.traces[-1].put(_Key())


@contextmanager
def without_key() -> Iterator[None]:
    """A block without key for the call of a program that takes the values of Variables as
    arguments: JAX may reuse the program for other values."""
    around = _thread.traces[-1] if _thread.traces else None
    key = None if around is None else around.key
    try:
        with _key_of_jax(()):
            yield
    finally:
        if around is not None and around.key is not key:  # the key was replaced inside the block
            around.put(around.key)
