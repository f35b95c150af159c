"""Which programs of inner functions JAX may use again: none that was made when a Variable in it was
another value than now.

JAX keeps the programs of inner functions (the bodies of loops, nested jits) by the function, and
does not run the function again. What such a function read of a Variable is a constant of its
program. So while a function is traced, a key of ours is a part of the key by which JAX keeps
programs. It is changed whenever a read may give another value, and an inner function has read a
Variable under it: inner functions are then run again. Functions whose inner functions read no
Variables all have one key, and share what JAX keeps; where there are no Variables there is none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tracegrad import _jax

_key_of_jax = _jax.user_context()


class _Key:
    is_used = False  # whether an inner function has read a Variable under it


class _Process:
    has_variables = False


class _Trace:
    """A function that is being traced: JAX's trace, and its keys, of which the last one counts."""

    def __init__(self, trace: Any, keys: ExitStack):
        self.trace = trace
        self._keys = keys
        self.key = _Key()

    def put(self, key: _Key) -> None:
        self.key = key
        self._keys.enter_context(_key_of_jax(key))

    def renew(self) -> None:
        if self.key.is_used:
            self.put(_Key())


class _Thread(threading.local):
    def __init__(self) -> None:
        self.traces: list[_Trace] = []  # outermost first
        self.unused = _Key()


_thread = _Thread()


def begin() -> None:
    """Is called when a Variable is made."""
    if not _Process.has_variables:
        _Process.has_variables = True
        for trace in _thread.traces:
            trace.put(_Key())


@contextmanager
def while_tracing() -> Iterator[None]:
    """A block in which a function is called, inside of its trace."""
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
        reads_change()  # to the function around


def is_traced() -> bool:
    """Whether a function is being traced, so that inner functions may read Variables."""
    return bool(_thread.traces)


def note_read() -> None:
    """Is called for each read that somebody listens to."""
    if _thread.traces:
        innermost = _thread.traces[-1]
        if _jax.staging_trace() is not innermost.trace:
            innermost.key.is_used = True


def reads_change() -> None:
    """Is called where the next read of a Variable may give another value, or somebody else is to
    hear of it."""
    if _thread.traces:
        _thread.traces[-1].renew()


@contextmanager
def for_all_values() -> Iterator[None]:
    """A call of a program that takes its Variables as arguments: it serves for other values too."""
    around = _thread.traces[-1] if _thread.traces else None
    key = None if around is None else around.key
    try:
        with _key_of_jax(()):
            yield
    finally:
        if around is not None and around.key is not key:  # it was changed inside of the block
            around.put(around.key)
