"""Finds the recorder of the current thread and trace, and installs it for the time of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tracegrad import _jax
from tracegrad.tape.recorder import Recorder
from tracegrad.tracing.overriding import OverridingTrace
from tracegrad.variables.lending import renew_array
from tracegrad.variables.listening import Listener, start_listening, stop_listening
from tracegrad.variables.variable import Variable

set_current_trace = _jax.set_current_trace


class _KeptRecorder(threading.local):
    recorder: Recorder | None = None


_kept = _KeptRecorder()


def recorder_here() -> Recorder:
    """Returns the recorder on the current trace of this thread, or a recorder to install there."""
    current = _jax.current_trace(None)
    if isinstance(current, Recorder):
        return current
    if not isinstance(current, _jax.TopLevelTrace):
        return Recorder(current)
    # Successive tapes share one recorder: a jitted function caches an entry for each trace around
    # its calls, and its calls take longer the more entries there are.
    kept = _kept.recorder
    if kept is None or kept.is_installed or kept.parent_trace is not current:
        kept = _kept.recorder = Recorder(current)
    return kept


def recorder_around() -> Recorder | None:
    """The recorder of the current operations, or None. (Traces that override gradients may be above
    it.)"""
    trace = _below_overriding()
    return trace if isinstance(trace, Recorder) else None


@contextmanager
def not_overridden() -> Iterator[None]:
    """A block without overridden gradients, for backward passes: the gradients of their operations
    were overridden when the operations ran."""
    with set_current_trace(_below_overriding()):
        yield


def _below_overriding() -> Any:
    trace = _jax.current_trace(None)
    while isinstance(trace, OverridingTrace):
        trace = trace.parent_trace
    return trace


class Recording(Listener):
    """The base of tapes and accumulators: a block that records on the thread that entered it, and
    listens to reads of Variables."""

    _name: str  # in messages

    def __init__(self) -> None:
        self._recorder: Recorder | None = None  # inside the block
        self._thread: int | None = None
        self._around: Sequence[Listener] = ()  # the outer listeners, innermost first
        self._has_read: set[Variable] = set()  # the Variables read since listening began

    def _begin(self) -> Recorder:
        if self._recorder is not None:
            self._check_thread()
            raise ValueError(
                f"this {self._name} is recording already: it cannot be entered twice at once"
            )
        self._recorder, self._thread = recorder_here(), threading.get_ident()
        return self._recorder

    def _check_thread(self) -> None:
        if self._recorder is not None and self._thread != threading.get_ident():
            raise RuntimeError(
                f"this {self._name} is recording in another thread, and sees only what is done "
                f"there: use one {self._name} for each thread, or call it after its block"
            )

    def _is_further_inside(self, value: Any) -> bool:
        """Whether a value belongs to a function that is being traced in the block: the recorder
        sees the call of the function, not its values."""
        trace = _jax.trace_of(value) if _jax.is_tracer(value) else None
        return any(around is self._recorder for around in _jax.outward(trace))

    def _start_listening(self) -> None:
        self._has_read.clear()
        self._around = start_listening(self)[::-1]

    def _stop_listening(self) -> None:
        self._around = ()
        stop_listening(self)

    def _renew(self, variable: Variable) -> None:
        """Makes the next read of a Variable return a new array object: arrays that were read before
        are constants to this block."""
        for outer in self._around:
            if outer.on_renewal(variable):
                return
        renew_array(variable)


def unrecorded() -> AbstractContextManager[None]:
    """A block that no tape records: operations go to the trace below the recorders."""
    return set_current_trace(_jax.current_trace_outside_of(Recorder))
