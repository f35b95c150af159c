"""Attempts at tracing a function: one that turns out to be another variant is left, and begun anew.

What a function does with what is outside of it (the Variables that it reads and assigns, whether it
recomputes, whether `tracegrad.gradients` asks for what it has computed) decides how it is traced
and compiled, and shows only while it is traced. So it is tried; what finds out that something else
is needed leaves the attempt, by the one exception that passes through the user's function, and says
what it has found. Whoever made the attempt makes the next one by that.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn


class AnotherVariant(BaseException):
    """Leaves the tracing of what is another variant of its function than was thought.

    No Exception, so that it passes through the ``except Exception`` of the user's functions.

    Attributes:
      of: what it is a variant of: whoever tries catches what is its own.
      found: what whoever tries is told.
    """

    def __init__(self, of: object, found: Any):
        super().__init__("nothing catches this but tracegrad")
        self.of = of
        self.found = found


class Attempt:
    """A block that is left, quietly, by an `AnotherVariant` of its own; then `found` is set.

    Not a function that is called, for the sake of the user's tracebacks; and what the next attempt
    raises does not seem to come from the handling of an error.

    Args:
      of: what is tried; None: the tracing of one program, which leaves no more than itself.
      known: what the one who traces may take for a trace of his, once.
    """

    def __init__(self, of: object = None, known: Any = None):
        self.of = object() if of is None else of
        self.is_tracing = of is None
        self.known = known
        self.found: Any = None

    def __enter__(self) -> Attempt:
        self._before = _here.attempts
        _here.attempts = (self, *self._before)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        _here.attempts, self._before = self._before, ()
        if isinstance(error, AnotherVariant) and error.of is self.of:
            self.found = error.found
            return True
        return False

    def leave(self, found: Any) -> NoReturn:
        """Ends the attempt."""
        raise AnotherVariant(self.of, found)


class _Here(threading.local):
    attempts: tuple[Attempt, ...] = ()  # of this thread, the innermost first


_here = _Here()


def attempt_at(of: object) -> Attempt | None:
    """The innermost attempt at this."""
    return next((attempt for attempt in _here.attempts if attempt.of is of), None)


def tracing_depth() -> int:
    """How many functions are being traced to graphs on this thread, one inside the other."""
    return sum(attempt.is_tracing for attempt in _here.attempts)


def trace_again(within: Any, depth: int) -> NoReturn:
    """Has a function that is being traced to a graph traced from the start once more, inside a
    context: what `within` returns. `depth`: the innermost's is `tracing_depth`."""
    [attempt for attempt in _here.attempts if attempt.is_tracing][-depth].leave(within)
