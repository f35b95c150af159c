"""Listeners: the objects that a Variable tells when it is read or assigned.

A Variable knows neither tapes nor traces. Code that must know of reads and assignments (a tape that
watches Variables, a trace that makes inputs and outputs of them, a rule that collects the Variables
of a function) is a `Listener`. Each thread has a stack of listeners. The innermost listener is
asked first. It calls the next listener outside of it, or not: so it decides what the outer ones
learn.
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

        `outside()` returns the value that the next outer listener gives; the outermost one gets the
        stored array. If a listener does not call it, the outer listeners do not learn of the read.
        """
        return outside()

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        """Gets the new value, which has the Variable's shape and dtype.

        `outside(value)` passes it to the next outer listener; after the outermost one, it is
        stored. If a listener does not call it, the outer listeners do not learn of the assignment.
        """
        outside(value)

    def on_renewal(self, variable: Variable) -> bool:
        """Makes the next read return a new object. Returns whether this listener provides the
        objects, so that the outer listeners need not be asked."""
        return False


class _Listeners(threading.local):
    stack: tuple[Listener, ...] = ()  # outermost first


_listeners = _Listeners()


def start_listening(listener: Listener) -> tuple[Listener, ...]:
    """Makes a listener the innermost one of this thread. Returns the outer listeners, outermost
    first."""
    kept_programs.reads_change()
    outside = _listeners.stack
    _listeners.stack = (*outside, listener)
    return outside


def stop_listening(listener: Listener) -> None:
    """Removes a listener from the stack of this thread, wherever it is in the stack."""
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
    """Returns the listeners of this thread, outermost first."""
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
    """Returns the value that a reader gets: the listeners' answer, or `stored(variable)` if there
    are none.

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


def heard_assignment(
    variable: Variable, value: Any, store: Callable[[Variable, Any], None]
) -> None:
    """Tells the listeners of this thread of an assignment; stores the value if they pass it on."""
    outside = partial(store, variable)
    for listener in _listeners.stack:
        outside = partial(listener.on_assign, variable, outside=outside)
    outside(value)
    kept_programs.reads_change()
