"""Computes the tangents of an accumulator's arrays while operations run."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.push_forward import PushForward, push_forward
from tracegrad.ir import Graph, GraphError
from tracegrad.ir.dependence import joined
from tracegrad.ir.parameters import Parameters
from tracegrad.rewriting.edits import find_matches
from tracegrad.rewriting.host_calls import end_gradients_at_host
from tracegrad.rewriting.match_rule import MatchRule
from tracegrad.tape.computations import Computation, trace_operation
from tracegrad.tape.programs import RULES
from tracegrad.tape.record import Record
from tracegrad.tape.recorded_rules import RecordedRule
from tracegrad.tape.recorder import Recorder
from tracegrad.tracing.in_force import rules_in_force, without_editing


class _ExecutedOperation(NamedTuple):
    computation: Computation
    args: Sequence[Any]
    results: Sequence[Any]
    source_info: Any


class Tangents(Record):
    """A record that keeps no operations, only the tangent of each followed array that is alive.

    If a tangent cannot be computed, the exception is kept instead of the tangent, and raised when
    the user asks for the tangent.
    """

    keeps_operations = False

    def __init__(self) -> None:
        super().__init__()
        self.tracked: dict[int, weakref.ref[Any]] = {}
        self._tangents: dict[int, Any] = {}
        self._recorder: Recorder | None = None
        self._waiting: list[tuple[_ExecutedOperation, Any]] = []

    def enter(self, recorder: Recorder) -> None:
        self._recorder = recorder
        recorder.add(self)

    def leave(self) -> None:
        assert self._recorder is not None, "it has entered"
        # This accumulator follows the tangents of inner accumulators' waiting operations.
        for record in self._recorder.records:
            if isinstance(record, Tangents):
                record._push_waiting()
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
        """Returns an array's tangent, the exception that is kept instead, or None."""
        self._push_waiting()
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
        self._push_waiting()
        operation = _ExecutedOperation(computation, args, results, info)
        trace = self._outer_trace()
        if computation.primitive not in RULES:
            self._compute_and_keep(operation, trace)
            return
        # JAX is still inside the call of a function with a custom rule, and allows one trace: of
        # the function, or of its rule. So the rule is traced after the call.
        self._waiting.append((operation, trace))
        for result in operation.results:
            if _jax.has_gradient(result):
                self.set(result, None)

    def _push_waiting(self) -> None:
        while self._waiting:
            self._compute_and_keep(*self._waiting.pop(0))

    def _compute_and_keep(self, operation: _ExecutedOperation, trace: Any) -> None:
        """Computes the tangents of the results in `trace`, and keeps them."""
        constants = operation.computation.constants
        found: list[Any] = [None] * constants
        found += [self._tangents.get(id(arg)) for arg in operation.args[constants:]]
        active = [i for i, tangent in enumerate(found) if tangent is not None]
        tangents: list[Any] = [None] * len(operation.results)
        if active:
            with _jax.set_current_trace(trace):
                try:
                    tangents = _push_tangents(operation, active, [found[i] for i in active])
                except Exception as error:
                    tangents = [error.with_traceback(None)] * len(operation.results)
        for result, tangent in zip(operation.results, tangents, strict=True):
            if tangent is None:
                self._forget(id(result))
            elif _jax.has_gradient(result):
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


# ----------------------------------------------------------------------------- one operation


def _push_tangents(
    operation: _ExecutedOperation, active: Sequence[int], given: Sequence[Any]
) -> list[Any]:
    """Returns the tangents of an operation's results; `given` are the tangents of its active
    operands.

    An operand whose tangent is an exception is active too: a custom rule may ask which operands are
    differentiated.
    """
    if rules_in_force():
        _refuse_rules(_trace_operation(operation))
    push = _push_forward(operation, active)
    failed = joined(1 << k for k, one in enumerate(given) if isinstance(one, Exception))
    input_tangents = [
        jnp.zeros_like(operation.args[i]) if isinstance(one, Exception) else one
        for i, one in zip(active, given, strict=True)
    ]
    values = iter(push.run(operation.args, input_tangents))
    tangents = [next(values) if mask else None for mask in push.linked]
    if failed:
        error = next(one for one in given if isinstance(one, Exception))
        return [
            error if mask & failed else tangent
            for tangent, mask in zip(tangents, push.linked, strict=True)
        ]
    return tangents


def _refuse_rules(graph: Graph) -> None:
    """Raises GraphError for a rule in force that would change the tangents of an operation. Such a
    rule acts on a whole program, but an accumulator computes tangents operation by operation."""
    rule_sets = [each for each in rules_in_force() if not each.acts_everywhere]
    for rule in (rule for rule_set in rule_sets for rule in rule_set.rules):
        if isinstance(rule, MatchRule) and rule.name not in _REVERSE_MODE_RULES:
            if isinstance(rule.where, Parameters):
                raise GraphError(_not_reached_text(rule, "each operation"))
            for match in find_matches(rule.where, graph, True, rule):
                raise GraphError(_not_reached_text(rule, match))


def _not_reached_text(rule: MatchRule, what: object) -> str:
    return (
        f"{rule!r} does not reach the tangents of a ForwardAccumulator, which computes "
        f"them as {what} runs. Use tracegrad.jvp of the function, to which rules apply, "
        "or apply the rule to the function itself: tracegrad.rewrite(fun, rule)"
    )


_REVERSE_MODE_RULES = {"recompute", "checkpointed_loop"}  # these rules do not change tangents


def _push_forward(operation: _ExecutedOperation, active: Sequence[int]) -> PushForward:
    """Returns the program of the tangents, which is jitted if the computation is kept."""
    computation = operation.computation
    key = PushForward, tuple(active), tuple(map(_jax.type_key, operation.args))
    program: PushForward | None = computation.derived.get(key)
    if program is None:
        with without_editing():
            program = push_forward(_trace_operation(operation), active)
        if computation.is_kept:
            program = program._replace(run=jax.jit(program.run))
        computation.derived[key] = program
    return program


def _trace_operation(operation: _ExecutedOperation) -> Graph:
    types = list(map(jax.typeof, operation.args))
    graph = trace_operation(operation.computation.called, types, operation.source_info)
    return end_gradients_at_host(graph)
