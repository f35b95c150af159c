"""Listeners: the objects that a Variable tells when it is read or assigned.

A Variable knows neither tapes nor traces. Code that must know of reads and assignments (a tape that
watches Variables, a trace that makes them inputs and outputs, a rule that collects the Variables of
a function) is a `Listener`. Each thread has a stack of listeners. The innermost listener is asked
first, and calls the next listener outside, or does not: then the outer listeners learn nothing.
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
    """Is told of each read and assignment of a Variable on its thread, while it listens.

    A method that a subclass does not define passes the event on to the outer listeners.
    """

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        """Returns the value that the reader gets.

        `outside()` returns the value that the next outer listener gives; the outermost listener
        gets the stored array. Without this call, the outer listeners do not learn of the read.
        """
        return outside()

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        """Gets the new value, which has the Variable's shape and dtype.

        `outside(value)` passes the value to the next outer listener; the outermost listener's call
        stores it. Without this call, the outer listeners do not learn of the assignment.
        """
        outside(value)

    def on_renewal(self, variable: Variable) -> bool:
        """Makes the next read return a new object. Returns whether this listener makes the objects
        that readers get: then nobody asks the outer listeners."""
        return False


class _Listeners(threading.local):
    stack: tuple[Listener, ...] = ()  # outermost first


_listeners = _Listeners()


def start_listening(listener: Listener) -> tuple[Listener, ...]:
    """The new listener is the innermost. Returns the others, outermost first."""
    kept_programs.note_reads_change()
    outside = _listeners.stack
    _listeners.stack = (*outside, listener)
    return outside


def stop_listening(listener: Listener) -> None:
    """The listener need not be the innermost."""
    kept_programs.note_reads_change()
    stack = _listeners.stack
    if stack and stack[-1] is listener:
        _listeners.stack = stack[:-1]
        return
    place = max((i for i, other in enumerate(stack) if other is listener), default=None)
    if place is None:
        raise RuntimeError("this listener does not listen on this thread")
    _listeners.stack = stack[:place] + stack[place + 1 :]


def listeners() -> tuple[Listener, ...]:
    """The listeners of this thread, outermost first."""
    return _listeners.stack


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    start_listening(listener)
    try:
        yield
    finally:
        stop_listening(listener)


def read_through_listeners(
    variable: Variable,
    stored: Callable[[Variable], Any],
    stack: tuple[Listener, ...] | None = None,
) -> Any:
    """Returns the value that a reader gets: the listeners' answer, or without listeners
    `stored(variable)`.

    `stack`: the listeners to ask, outermost first; default: all listeners of this thread.
    """
    asked = _listeners.stack if stack is None else stack
    if not asked:
        return stored(variable)
    kept_programs.note_read()
    outside = partial(stored, variable)
    for listener in asked[:-1]:
        outside = partial(listener.on_read, variable, outside)
    return asked[-1].on_read(variable, outside)


def assign_through_listeners(
    variable: Variable, value: Any, store: Callable[[Variable, Any], None]
) -> None:
    """Stores the value if all listeners of this thread pass it on."""
    outside = partial(store, variable)
    for listener in _listeners.stack:
        outside = partial(listener.on_assign, variable, outside=outside)
    outside(value)
    kept_programs.note_reads_change()
