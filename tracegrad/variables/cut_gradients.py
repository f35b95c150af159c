"""Warns if a gradient is lost because a Variable was assigned a differentiated value, then read.

Assignment is not differentiated. Inside `jax.grad`, a Variable gets the primal of an assigned
value. If the function reads the Variable again, the gradient through that read is silently zero.
There is no warning if the next call is the first to read the Variable (nothing is lost), or if the
Variable is not trainable (it should have no gradient).
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
        # By the id of a Variable: a weak reference to the Variable, a weak reference to the trace
        # that differentiates the assigned value, and the line of the assignment.
        self.of: dict[int, tuple[Any, Any, Any]] = {}


_cuts = _Cuts()


def cut_gradient(variable: Any, value: Any) -> Any:
    """Returns the primal of an assigned value, and notes the cut."""
    plain = _jax.undifferentiated(value)
    if plain is not value and variable.trainable and _jax.has_gradient(variable):
        trace = _jax.trace_of(value)
        is_differentiated = not _jax.is_tracer(plain) or _jax.trace_of(plain) is not trace
        if is_differentiated:
            _forget_ended_cuts()
            _cuts.of[id(variable)] = weakref.ref(variable), weakref.ref(trace), calling_line()
    return plain


def _forget_ended_cuts() -> None:
    _cuts.of = {key: cut for key, cut in _cuts.of.items() if cut[0]() is not None and cut[1]()}


def forget_cut(variable: Any) -> None:
    if _cuts.of:
        _cuts.of.pop(id(variable), None)


def warn_if_cut(variable: Any) -> None:
    """Warns once if a read gets a value whose gradient was cut, inside the same `jax.grad`."""
    cut = _cuts.of.get(id(variable)) if _cuts.of else None
    if cut is None:
        return
    variable_ref, trace_ref, line = cut
    trace = trace_ref()
    here = _jax.outward(_jax.current_trace(None))
    if variable_ref() is not variable or trace is None or all(each is not trace for each in here):
        return
    del _cuts.of[id(variable)]
    warn_of_cut(variable.name, line)


def warn_of_cut(name: str, line: Origin | None) -> None:
    """`line`: the line of the assignment."""
    where = "" if line is None else f" ({line.place})"
    warn_where_called(
        f"the Variable {name!r} is read after it was assigned a value that is being "
        f"differentiated{where}. Assignment is not differentiated, so no gradient flows from this "
        f"read to that value: {CURE}.",
        UserWarning,
    )
