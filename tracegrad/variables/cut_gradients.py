"""Warns where a gradient is lost in a Variable: assigned what is being differentiated, and read.

Assignment is not differentiated. Inside of `jax.grad` a Variable gets the plain value of what is
being differentiated there; whoever reads it again in the same function has a gradient of zero
from there on, which nobody sees. A state that is read at the next call loses nothing, and one
that is not trainable is meant to have no gradient.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from tracegrad import _jax
from tracegrad.ir.occurrence import calling_line, warn_where_called


class _Cuts(threading.local):
    def __init__(self) -> None:
        # By the identity of a Variable: it, the transformation that differentiates what it was
        # assigned, both weakly, and the line.
        self.of: dict[int, tuple[Any, Any, Any]] = {}


_cuts = _Cuts()


def without_gradient(variable: Any, value: Any) -> Any:
    """What a Variable is assigned, without what is being differentiated of it."""
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
    """Forgets what was assigned before."""
    if _cuts.of:
        _cuts.of.pop(id(variable), None)


def warn_if_cut(variable: Any) -> None:
    """Warns, once, if what a reader gets has lost a gradient that is being taken here."""
    found = _cuts.of.get(id(variable)) if _cuts.of else None
    if found is None:
        return
    known, ref, line = found
    trace = ref()
    here = _jax.outward(_jax.current_trace(None))
    if known() is not variable or trace is None or all(each is not trace for each in here):
        return
    del _cuts.of[id(variable)]
    warn_of_cut(variable.name, "" if line is None else line.place)


def warn_of_cut(name: str, place: str) -> None:
    """Warns that a Variable of this name is read after it was assigned, at this place, a value
    whose gradient is being taken."""
    where = f" ({place})" if place else ""
    warn_where_called(
        f"the Variable {name!r} is read after it was assigned what is being "
        f"differentiated{where}: assignment is not differentiated, so that no gradient flows from "
        "here to that value. Use the value itself, or stop its gradient where it is assigned, by "
        "`jax.lax.stop_gradient`.",
        UserWarning,
    )
