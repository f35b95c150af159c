"""Attempts at tracing a function: an attempt can end early, to trace in another context.

If `tracegrad.gradients` asks for values that a function has computed, the function must be traced
in another context, but this shows only while the function is traced. So tracing is an attempt:
`gradients` leaves the attempt, by the one exception that passes through the user's function, and
names the context for the next attempt.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn


class AttemptLeft(BaseException):
    """Not an `Exception`, to pass through ``except Exception`` in the user's functions."""


class Attempt:
    """A block in which a function is traced; `trace_again` ends the block without an error.

    A context manager adds no frame to the user's tracebacks, and the errors of the next attempt are
    not chained to the exception that ended this attempt.

    Attributes:
      is_left: whether `trace_again` was called. If the function has caught the exception
        (``except:``) and returned, its trace is discarded.
      within: makes the context for the next attempt.
    """

    within: Any = None
    is_left = False

    def __enter__(self) -> Attempt:
        self._before = _open_attempts.attempts
        _open_attempts.attempts = (self, *self._before)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        _open_attempts.attempts, self._before = self._before, ()
        return self.is_left and error is not None


class _OpenAttempts(threading.local):
    attempts: tuple[Attempt, ...] = ()  # on this thread, innermost first


_open_attempts = _OpenAttempts()


def tracing_depth() -> int:
    """How many nested functions are being traced to graphs on this thread."""
    return len(_open_attempts.attempts)


def trace_again(within: Any, depth: int) -> NoReturn:
    """Restarts the trace of a function inside the context that `within()` returns.

    `depth`: 1 for the outermost function that is being traced, `tracing_depth()` for the innermost.
    """
    attempt = _open_attempts.attempts[-depth]
    attempt.within, attempt.is_left = within, True
    raise AttemptLeft("nothing catches this but tracegrad")
