"""Computes the tangents of an accumulator's arrays while operations run."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.differentiation.push_forward import PushForward, push_forward
from tracegrad.rewriting.host_calls import end_gradients_at_host
from tracegrad.tape.computations import Computation, trace_operation
from tracegrad.tape.record import Record
from tracegrad.tape.recorded_rules import RecordedRule
from tracegrad.tape.recorder import Recorder
from tracegrad.tracing.in_force import without_editing


class Tangents(Record):
    """A record that keeps no operations, only the tangent of each followed array that is alive."""

    keeps_operations = False

    def __init__(self) -> None:
        super().__init__()
        self.tracked: dict[int, weakref.ref[Any]] = {}
        self._tangents: dict[int, Any] = {}
        self._recorder: Recorder | None = None

    def enter(self, recorder: Recorder) -> None:
        self._recorder = recorder
        recorder.add(self)

    def leave(self) -> None:
        assert self._recorder is not None, "it has entered"
        self._recorder.remove(self)
        self._recorder = None

    def set(self, array: Any, tangent: Any) -> None:
        """Follows an array until it is freed."""
        weak_self, identity = weakref.ref(self), id(array)

        def forget(_: Any) -> None:
            self = weak_self()  # a weak reference, so that this callback keeps no accumulator alive
            if self is not None:
                self._forget(identity)

        self._tangents[identity] = tangent
        self.tracked[identity] = weakref.ref(array, forget)

    def _forget(self, identity: int) -> None:
        self._tangents.pop(identity, None)
        self.tracked.pop(identity, None)

    def get(self, array: Any) -> Any:
        """Returns an array's tangent, or None."""
        return self._tangents.get(id(array))

    # ------------------------------------------------------------------------------ operations

    def add(
        self,
        computation: Computation | RecordedRule,
        args: Sequence[Any],
        results: Sequence[Any],
        info: Any,
    ) -> None:
        """Computes the tangents of the results of an operation that has run."""
        assert isinstance(computation, Computation), "a rule is traced under an accumulator"
        constants = computation.constants
        given = [None] * constants + [self.get(arg) for arg in args[constants:]]
        active = [i for i, tangent in enumerate(given) if tangent is not None]
        if not active:
            return
        with _jax.set_current_trace(self._outer_trace()):
            push = _push_forward(computation, args, info, active)
            values = iter(push.run(args, [given[i] for i in active]))
        for result, is_linked in zip(results, push.linked, strict=True):
            if is_linked:
                tangent = next(values)
                if _jax.has_gradient(result):
                    self.set(result, tangent)

    def _outer_trace(self) -> Any:
        """Returns the trace in which tangents are computed, so that outer tapes and accumulators
        record these operations."""
        assert self._recorder is not None, "only an entered record gets operations"
        records = self._recorder.records
        outer = records[: next(i for i, record in enumerate(records) if record is self)]
        if not any(record.tracked for record in outer):
            return self._recorder.parent_trace
        recorder = Recorder(self._recorder.parent_trace)
        recorder.records = outer
        return recorder


def _push_forward(
    computation: Computation, args: Sequence[Any], info: Any, active: Sequence[int]
) -> PushForward:
    """Returns the program of the tangents, which is jitted if the computation is kept."""
    key = PushForward, tuple(active), tuple(map(_jax.type_key, args))
    program: PushForward | None = computation.derived.get(key)
    if program is None:
        with without_editing():
            graph = trace_operation(computation.called, list(map(jax.typeof, args)), info)
            program = push_forward(end_gradients_at_host(graph), active)
        if computation.is_kept:
            program = program._replace(run=jax.jit(program.run))
        computation.derived[key] = program
    return program
