"""Warns if a gradient is lost because a Variable was assigned a differentiated value, then read.

Assignment is not differentiated. Inside `jax.grad`, a Variable gets the primal of an assigned
value. If the function reads the Variable again, the gradient through that read is silently zero.
There is no warning if the Variable is read only at the next call, where nothing is lost, or if it
is not trainable, which means that it should have no gradient.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from tracegrad import _jax
from tracegrad.ir.occurrence import Origin, calling_line, warn_where_called

CURE = (
    "use the value itself; or, if no gradient is meant, assign `jax.lax.stop_gradient` of the value"
)


class _Cuts(threading.local):
    def __init__(self) -> None:
        # By the id of a Variable: a weak reference to it, a weak reference to the trace that
        # differentiates the value assigned to it, and the line of the assignment.
        self.of: dict[int, tuple[Any, Any, Any]] = {}


_cuts = _Cuts()


def without_gradient(variable: Any, value: Any) -> Any:
    """Returns the primal of an assigned value; notes that its gradient is cut here."""
    plain = _jax.undifferentiated(value)
    if plain is not value and variable.trainable and _jax.has_gradient(variable):
        trace = _jax.trace_of(value)
        is_differentiated = not _jax.is_tracer(plain) or _jax.trace_of(plain) is not trace
        if is_differentiated:
            _forget_what_is_over()
            _cuts.of[id(variable)] = weakref.ref(variable), weakref.ref(trace), calling_line()
    return plain


def _forget_what_is_over() -> None:
    _cuts.of = {key: cut for key, cut in _cuts.of.items() if cut[0]() is not None and cut[1]()}


def assigned_anew(variable: Any) -> None:
    """Drops the note of an earlier assignment to a Variable."""
    if _cuts.of:
        _cuts.of.pop(id(variable), None)


def warn_if_cut(variable: Any) -> None:
    """Warns once if a read gets a value whose gradient was cut, inside the same `jax.grad`."""
    found = _cuts.of.get(id(variable)) if _cuts.of else None
    if found is None:
        return
    known, ref, line = found
    trace = ref()
    here = _jax.outward(_jax.current_trace(None))
    if known() is not variable or trace is None or all(each is not trace for each in here):
        return
    del _cuts.of[id(variable)]
    warn_of_cut(variable.name, line)


def warn_of_cut(name: str, line: Origin | None) -> None:
    """Warns that a Variable of this name is read after it was assigned, at this line, a value whose
    gradient is being taken."""
    where = "" if line is None else f" ({line.place})"
    warn_where_called(
        f"the Variable {name!r} is read after it was assigned a value that is being "
        f"differentiated{where}. Assignment is not differentiated, so no gradient flows from this "
        f"read to that value: {CURE}.",
        UserWarning,
    )
