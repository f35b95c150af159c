"""Attempts at tracing a function: an attempt can be abandoned, to trace in another context.

If `tracegrad.gradients` asks for values that a function has computed, the function must be traced
in another context, but this shows only while it is traced. So tracing is an attempt: `gradients`
leaves it, by the one exception that passes through the user's function, and names the context in
which to trace the function. The caller of the attempt then makes the next attempt in that context.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn


class Left(BaseException):
    """Raised to leave an attempt.

    Not an `Exception`, so that it passes through ``except Exception`` in the user's functions.
    """

    def __init__(self) -> None:
        super().__init__("nothing catches this but tracegrad")


class Attempt:
    """A block in which a function is traced. `leave` ends the block without an error, and sets
    `found`.

    It is a context manager, so that it adds no frame to the user's tracebacks, and errors of the
    next attempt are not chained to the exception that ended this one.

    Attributes:
      is_left: whether `leave` was called, even if the function has caught the exception
        (``except:``) and then returned or raised something else: that trace is discarded.
    """

    def __init__(self) -> None:
        self.found: Any = None
        self.is_left = False

    def __enter__(self) -> Attempt:
        self._before = _here.attempts
        _here.attempts = (self, *self._before)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        _here.attempts, self._before = self._before, ()
        return self.is_left and error is not None

    def leave(self, found: Any) -> NoReturn:
        """Ends the attempt."""
        self.found, self.is_left = found, True
        raise Left


class _Here(threading.local):
    attempts: tuple[Attempt, ...] = ()  # on this thread, innermost first


_here = _Here()


def tracing_depth() -> int:
    """Returns how many functions are being traced to graphs on this thread, nested."""
    return len(_here.attempts)


def trace_again(within: Any, depth: int) -> NoReturn:
    """Restarts the trace of a function inside the context that `within()` returns.

    `depth`: 1 for the outermost function that is being traced, `tracing_depth()` for the innermost.
    """
    _here.attempts[-depth].leave(within)
