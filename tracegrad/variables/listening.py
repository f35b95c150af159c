"""The hook by which a Variable says when it is used.

A Variable knows neither tapes nor traces. Whoever wants to know that one is read or assigned (a
tape that watches it, a trace that makes an input and an output of it, a rule that collects those
that a function uses) listens: see `Listener`. Listeners stand around one another, one stack per
thread. The innermost is asked first, and asks the next one out itself, so that it decides what
those outside of it learn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tracegrad.variables import kept_programs

if TYPE_CHECKING:
    from tracegrad.variables.variable import Variable


class Listener(Protocol):
    """Who is told that a Variable is read or assigned on its thread, while it listens.

    One that inherits from this lets go on to those outside what it does not define.
    """

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        """Returns the value that the reader gets.

        `outside()` is the value that the next listener out would give, in the end the stored
        array; not to call it keeps the read from those outside.
        """
        return outside()

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        """Is given the new value, of the Variable's shape and dtype.

        `outside(value)` hands it on, in the end to be stored; not to call it keeps the assignment
        from those outside.
        """
        outside(value)

    def on_renewal(self, variable: Variable) -> bool:
        """Has the next read give another object than those before; whether it is this listener
        that gives them, so that those outside need not be asked."""
        return False


class _Listeners(threading.local):
    stack: tuple[Listener, ...] = ()  # outermost first


_listeners = _Listeners()


def start_listening(listener: Listener) -> tuple[Listener, ...]:
    """Makes a listener the innermost one of this thread. Returns those outside of it, outermost
    first."""
    kept_programs.reads_change()
    outside = _listeners.stack
    _listeners.stack = (*outside, listener)
    return outside


def stop_listening(listener: Listener) -> None:
    """Takes a listener of this thread away, the innermost one or not."""
    kept_programs.reads_change()
    stack = _listeners.stack
    if stack and stack[-1] is listener:
        _listeners.stack = stack[:-1]
        return
    place = max((i for i, other in enumerate(stack) if other is listener), default=None)
    if place is None:
        raise RuntimeError("this listener does not listen on this thread")
    _listeners.stack = stack[:place] + stack[place + 1 :]


def listeners() -> tuple[Listener, ...]:
    """Those of this thread, outermost first."""
    return _listeners.stack


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Listens to the Variables that this thread reads and assigns inside the block."""
    start_listening(listener)
    try:
        yield
    finally:
        stop_listening(listener)


def heard_read(
    variable: Variable,
    stored: Callable[[Variable], Any],
    stack: tuple[Listener, ...] | None = None,
) -> Any:
    """What a reader gets of a Variable: what the listeners of this thread make of `stored`.

    `stack`: those of them that are asked, outermost first; default: all.
    """
    asked = _listeners.stack if stack is None else stack
    if not asked:
        return stored(variable)
    kept_programs.note_read()
    outside = partial(stored, variable)
    for listener in asked[:-1]:
        outside = partial(listener.on_read, variable, outside)
    return asked[-1].on_read(variable, outside)


def heard_assignment(
    variable: Variable, value: Any, store: Callable[[Variable, Any], None]
) -> None:
    """Tells the listeners of this thread of an assignment; what they let through is stored."""
    outside = partial(store, variable)
    for listener in _listeners.stack:
        outside = partial(listener.on_assign, variable, outside=outside)
    outside(value)
    kept_programs.reads_change()
