"""Where the Variables are read that a function reads which is traced for one call: around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tracegrad import _jax
from tracegrad.variables.listening import listening
from tracegrad.variables.variable import Variable


class InOwnTrace:
    """Listens to a function in the trace of its own program, which is a new one for every call.

    The programs of functions further inside (the bodies of loops, nested jits) are kept by JAX, and
    not traced again: a value from around the function must not get into them.
    """

    _own: Any = None

    @contextmanager
    def around(self: Any) -> Iterator[None]:
        """Listens while the function runs: a block inside of what is traced."""
        self._own = _jax.staging_trace()
        with listening(self):
            yield

    @property
    def _is_inside(self) -> bool:
        """Whether a function further inside is being traced now."""
        return _jax.staging_trace() is not self._own


class ReadsOutside(InOwnTrace):
    """For a function that is traced to be run once, here and now: what it reads of Variables is
    what it would read if it were not traced, a value of the trace around it. (A `Listener`.)

    The function's own trace has that as an operand: no value stays in it for a later call.
    """

    def __init__(self) -> None:
        self._trace = _jax.current_trace(None)

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        if self._is_inside:
            return outside()
        with _jax.set_current_trace(self._trace):
            value = outside()
        return self.operand(variable, value)

    def operand(self, variable: Variable, value: Any) -> Any:
        """What the function gets for the value of a Variable around it."""
        return value

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        outside(value)
