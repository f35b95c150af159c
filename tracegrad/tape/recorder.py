"""The recorder of operations, and of functions with custom rules (`jax.custom_vjp` and its like).

A function with a rule runs on values, that is, on concrete arrays; its rule also runs on values,
when a gradient is computed. Under a transformation, or if an accumulator needs tangents, the
function is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir.dependence import joined
from tracegrad.tape.computations import links_of
from tracegrad.tape.known_computations import computation_of_rule
from tracegrad.tape.lost_gradients import add_lost_operands, find_lost_by_rule, find_lost_operands
from tracegrad.tape.operation_recorder import OperationRecorder, active_operands
from tracegrad.tape.programs import RULES, closes_over_watched
from tracegrad.tape.record import Record
from tracegrad.tape.recorded_rules import RecordedRule, parts_of_rule
from tracegrad.tape.rules_of_jax import rule_of_jax, traced_rule
from tracegrad.tracing.in_force import rules_in_force

set_current_trace = _jax.set_current_trace
current_source_info = _jax.current_source_info
# An identity: its results are the operands of a function with a rule, as new objects.
_OPERANDS = RecordedRule("operands", lambda *xs: list(xs), lambda cotangents, _: list(cotangents))


class Recorder(OperationRecorder):
    """Runs operations and functions with rules under its parent, and adds each to the records that
    track an operand."""

    @property
    def runs_rules_on_values(self) -> bool:
        """False with a `ForwardAccumulator`, whose tangents need a traced rule, to transpose it."""
        return self.is_top and all(record.keeps_operations for record in self.records)

    def count_entries(self) -> dict[Record, tuple[int, int]]:
        """Counts the (entries, lost gradients) of each record, for `record_rule`."""
        return {record: (len(record.entries), len(record.lost)) for record in self.records}

    def record_rule(
        self,
        rule: RecordedRule,
        operands: Sequence[Any],
        computed: Sequence[Any],
        begun: Mapping[Record, tuple[int, int]],
    ) -> Sequence[Any]:
        """Records a call of a function with a rule as one entry, and returns the entry's results.

        The results are new array objects with the values of `computed`: only the rule connects the
        results to `operands`. `begun`: from `count_entries`.
        """
        watching = self.watching(operands)
        if not computed or not (watching or self.watching(computed)):
            return computed
        results = [self.alias(result) for result in computed]
        info = current_source_info()
        for record in self.records:
            lost = []
            if (counts := begun.get(record)) is not None:
                lost = find_lost_by_rule(record, counts, rule, operands, computed, info)
            if lost or record in watching:
                record.add(rule, operands, results, info)
                record.add_lost(lost)
        return results

    def run_rule(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        if self._overriding is not None:
            find = self._overriding.rule_instead
            results = self.run_instead(find, args, primitive, subfuns, params, args)
            if results is not None:
                return results
        if not self.records:
            with set_current_trace(self.parent_trace):
                return list(primitive.bind(*args, subfuns=subfuns, **params))
        if self.runs_rules_on_values and not rules_in_force():
            with set_current_trace(self.parent_trace):
                jax_rule = rule_of_jax(primitive, subfuns, args, params)
            if jax_rule is None:
                return self._run_rule_on_values(primitive, subfuns, args, params)
            results = list(self.apply(jax_rule.computation, args, self.watching(args)))
        else:
            with set_current_trace(self.parent_trace):
                traced = traced_rule(primitive, subfuns, args, params)
            results = self._run_traced_rule(*traced)
        # JAX reads the tree of the results from the function or from its rule, and expects exactly
        # one of the two to have run. The rule has run if the parent or the tape differentiates it.
        if _jax.has_run(subfuns[1]):
            _jax.forget_result_trees(subfuns[0])
        return results

    def _run_rule_on_values(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        """Differentiates a function with a rule by JAX's VJP: the rule runs forward on values now,
        and backward when a gradient is computed. Outer tapes record both passes, to differentiate
        them."""
        operands = self.copy_mutable_operands(
            str(getattr(subfuns[0], "__name__", primitive.name)), args
        )
        watching = self.watching(operands)
        active = active_operands(operands, watching)
        operands = self._as_new_objects(operands, active, watching)
        name = getattr(_jax.rule_functions(subfuns)[0][0], "__name__", primitive.name)
        of_users = [record for record in self.records if not isinstance(record, ClosureWatch)]
        watches = [ClosureWatch(record, operands) for record in of_users]

        def bind(*operands: Any) -> list[Any]:
            return list(primitive.bind(*operands, subfuns=subfuns, **params))

        def called(*operands: Any) -> list[Any]:
            for fun in subfuns[:2]:
                _jax.forget_result_trees(fun)
            return bind(*operands)

        answered: set[int] = set()  # the operands for which the rule returned a gradient, not None
        flowing: set[int] = set()  # the results that have a cotangent

        def witnessed(operands: list[Any]) -> list[Any]:
            results = bind(*_jax.with_witnesses(operands, 0, answered))
            return _jax.with_gates(results, flowing) if len(results) > 1 else results

        inner = watching[-1] if watching else None
        with _with_one_order_less(self, inner, watches), set_current_trace(self):
            if active:
                try:
                    results, vjp = _jax.vjp_of_some(witnessed, operands, active)
                except Exception as error:
                    if "closed-over value" in str(error):
                        raise closes_over_watched(self._name_of(called, operands)) from error
                    raise
            else:
                results = subfuns[0].call_wrapped(*operands)
        if any(watch.has_seen for watch in watches):
            raise closes_over_watched(self._name_of(called, operands))
        if not active:
            return list(results)
        types = list(map(jax.typeof, results))

        def pull_back(cotangents: Sequence[Any], sparse: Sequence[bool]) -> list[Any]:
            filled = [
                ct if ct is not None else _zero_cotangent(aval)
                for ct, aval in zip(cotangents, types)
            ]
            answered.clear()
            flowing.clear()
            flowing.update(k for k, ct in enumerate(cotangents) if ct is not None)
            of_active = dict(zip(active, vjp(filled), strict=True))
            cts = [of_active.get(i) if i in answered else None for i in range(len(operands))]
            if primitive is _jax.CUSTOM_JVP and not answered.issuperset(active):
                zeros = _zeros_from_jvp(
                    called, operands, active, [ct is not None for ct in cotangents]
                )
                cts = [zeros.get(i) if ct is None else ct for i, ct in enumerate(cts)]
            return cts

        position = {id(x): i for i, x in enumerate(operands)}
        returned_operands = {k: position[id(r)] for k, r in enumerate(results) if id(r) in position}
        rule = RecordedRule(name, called, pull_back, returned_operands=returned_operands)
        results = [self.alias(result) for result in results]
        info = current_source_info()
        for record in watching:
            record.add(rule, operands, results, info)
        parts = parts_of_rule(subfuns[2]) if primitive is _jax.CUSTOM_VJP else None
        if parts is not None and parts.closed_over:
            kept = [(fun, _jax.result_trees(fun)) for fun in subfuns[:2] if _jax.has_run(fun)]
            with set_current_trace(self.parent_trace):
                lost = find_lost_operands(called, list(map(jax.typeof, operands)))
            for fun in subfuns[:2]:
                _jax.forget_result_trees(fun)
            for fun, trees in kept:  # JAX reads the tree of the results from there
                _jax.leave_result_trees(fun, trees)
            add_lost_operands(watching, lost, operands, results)
        return results

    def _as_new_objects(
        self, operands: Sequence[Any], active: Sequence[int], watching: Sequence[Record]
    ) -> list[Any]:
        """Returns the operands of a function with a rule, the active operands as new objects: so
        the `ClosureWatch`es see if the function closes over the array that it is called with."""
        if not active:
            return list(operands)
        new, info = {i: self.alias(operands[i]) for i in active}, current_source_info()
        for record in watching:
            record.add(_OPERANDS, [operands[i] for i in active], list(new.values()), info)
        return [new.get(i, x) for i, x in enumerate(operands)]

    def _name_of(self, called: Callable[..., list[Any]], operands: Sequence[Any]) -> str:
        """Returns the name of the function with a rule that `called` calls."""
        with set_current_trace(self.parent_trace):
            program = jax.make_jaxpr(called)(*operands)
        rules = [e for e in _jax.opened(program).eqns if e.primitive in RULES]
        return str(_jax.traced_from(rules[0].params["call_jaxpr"]).name) if rules else "a function"

    def _run_traced_rule(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        """Runs and records a function with a rule that was traced to an equation, in which the
        values that the function closes over are operands. Raises if such a value is watched."""
        primitive, params = equation.primitive, equation.params
        constants = _jax.count_closed_over(params)
        facts = _jax.facts_below(params)
        if self.watching([*operands[:constants], *facts.arrays]):
            raise closes_over_watched(_jax.traced_from(params["call_jaxpr"]).name)
        watching = self.watching(operands)
        with set_current_trace(self.parent_trace):
            if not watching:
                return _jax.bind(primitive, operands, params)
            computation = computation_of_rule(primitive, params)
        computation.constants = constants
        return list(self.apply(computation, operands, watching))


class ClosureWatch(Record):
    """Stands beside a record while a function with a rule runs on values. `has_seen`: whether the
    function has used an array that the record follows and that is no operand."""

    def __init__(self, record: Record, operands: Sequence[Any]):
        super().__init__(orders=0)
        self.has_seen = False
        self._followed, self._last = record.tracked, len(record.arrays)
        self._operand_ids = set(map(id, operands))

    def tracks(self, arrays: Any) -> bool:
        for array in arrays:
            slot = self._followed.get(id(array))
            if slot is not None and slot < self._last and id(array) not in self._operand_ids:
                self.has_seen = True
        return False


@contextmanager
def _with_one_order_less(
    recorder: OperationRecorder, inner: Record | None, watches: Sequence[ClosureWatch]
) -> Iterator[None]:
    """A block in which the innermost record records for one order of derivative less; at order 0,
    the record is left out. So a forward function that calls its own function does not run forever.
    """
    records = recorder.records
    if inner is not None:
        inner.orders -= 1
    recorder.records = [*(r for r in records if r is not inner or r.orders > 0), *watches]
    try:
        yield
    finally:
        recorder.records = records
        if inner is not None:
            inner.orders += 1


def _zeros_from_jvp(
    called: Callable[..., list[Any]],
    operands: Sequence[Any],
    active: Sequence[int],
    flowing: Sequence[bool],
) -> dict[int, Any]:
    """Returns zeros for each active operand that is connected to a result with a cotangent
    (`flowing`): a custom JVP has returned zeros as derivative, and JAX has dropped them."""
    with set_current_trace(_jax.current_trace_outside_of(Recorder)):
        rows = links_of(called, list(map(jax.typeof, operands)), active)
    linked = joined(compress(rows, flowing))
    return {i: jnp.zeros_like(x) for i, x in enumerate(operands) if linked >> i & 1}


def _zero_cotangent(aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype) if _jax.has_gradient(aval) else _jax.no_cotangent(aval)
