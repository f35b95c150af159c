"""Attempts at tracing a function: one that has to be traced otherwise is left, and begun anew.

Whether `tracegrad.gradients` asks for what a function has computed decides how the function is
traced, and shows only while it is traced. So tracing is tried; `gradients` leaves the attempt, by
the one exception that passes through the user's function, and says in which context the function is
to be traced. Whoever made the attempt makes the next one in that.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn


class Left(BaseException):
    """Leaves an attempt.

    No Exception, so that it passes through the ``except Exception`` of the user's functions.
    """

    def __init__(self) -> None:
        super().__init__("nothing catches this but tracegrad")


class Attempt:
    """A block in which a function is traced. It is left, quietly, by `leave`; then `found` is set.

    Not a function that is called, for the sake of the user's tracebacks; and what the next attempt
    raises does not seem to come from the handling of an error.

    Attributes:
      is_left: whether it was, also where the function has caught what leaves it (``except:``), and
        returned or raised something else: what it traced then is nothing that it would compute.
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
    attempts: tuple[Attempt, ...] = ()  # of this thread, the innermost first


_here = _Here()


def tracing_depth() -> int:
    """How many functions are being traced to graphs on this thread, one inside the other."""
    return len(_here.attempts)


def trace_again(within: Any, depth: int) -> NoReturn:
    """Has a function that is being traced to a graph traced from the start once more, inside a
    context: what `within` returns. `depth`: the innermost's is `tracing_depth`."""
    _here.attempts[-depth].leave(within)
