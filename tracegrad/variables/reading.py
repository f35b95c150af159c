"""A listener for functions that are traced for one call: Variables are read outside of the trace.

Otherwise the value would be a constant of the trace, or a tracer that outlives its own trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tracegrad import _jax
from tracegrad.variables import kept_programs
from tracegrad.variables.listening import Listener, listening
from tracegrad.variables.variable import Variable


class ReadsOutside(Listener):
    """Listens while a function is traced to be run once, immediately: the function reads values of
    the trace around it, as if it were not traced.

    The values are operands of the function's trace, so no value stays there for a later call.
    Outside of functions traced by `tracegrad.trace`, nested jits and bodies of loops must not read
    Variables: JAX would cache the values.
    """

    def __init__(self) -> None:
        self._trace = _jax.current_trace(None)
        self._own: Any = None

    @contextmanager
    def around(self) -> Iterator[None]:
        """A block inside the function's trace, in which the function runs."""
        self._own = _jax.staging_trace()
        with listening(self):
            yield

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        if kept_programs.is_tracing() or _jax.staging_trace() is self._own:
            return self.own_read(variable, outside)
        return outside()

    def own_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        with _jax.set_current_trace(self._trace):
            return outside()
