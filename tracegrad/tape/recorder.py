"""The recorder of operations, and of functions with custom rules.

A `jax.custom_vjp` or `jax.custom_jvp` is traced at each call. A function with a `custom_gradient`
runs on values, that is, on concrete arrays; its gradient function also runs on values, when a
gradient is computed. Under a transformation, or if an accumulator needs tangents, it is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracegrad import _jax
from tracegrad.tape.known_computations import computation_of_rule
from tracegrad.tape.lost_gradients import find_closed_over, warn_of_lost
from tracegrad.tape.operation_recorder import OperationRecorder
from tracegrad.tape.programs import closes_over_watched
from tracegrad.tape.record import Record
from tracegrad.tape.recorded_rules import RecordedRule, UserNames
from tracegrad.tape.rules_of_jax import rule_of_jax, traced_rule
from tracegrad.tracing.in_force import rules_in_force

set_current_trace = _jax.set_current_trace
current_source_info = _jax.current_source_info


class Recorder(OperationRecorder):
    """Runs operations and functions with rules under its parent, and adds each to the records that
    track an operand."""

    @property
    def runs_rules_on_values(self) -> bool:
        """False with a `ForwardAccumulator`, whose tangents need a traced rule, to transpose it."""
        return self.is_top and all(record.keeps_operations for record in self.records)

    def count_entries(self) -> dict[Record, int]:
        """Counts the entries of each record, for `record_rule`."""
        return {record: len(record.entries) for record in self.records}

    def record_rule(
        self,
        rule: RecordedRule,
        operands: Sequence[Any],
        computed: Sequence[Any],
        begun: Mapping[Record, int],
        describe: Callable[[Any], UserNames],
    ) -> Sequence[Any]:
        """Records a call of a function with a rule as one entry, and returns the entry's results.

        The results are new array objects with the values of `computed`: only the rule connects the
        results to `operands`. Warns of followed arrays that the function closes over.

        Args:
          begun: from `count_entries`, before the call.
          describe: returns the user's names for the function, and for such an array.
        """
        watching = self.watching(operands)
        if not computed or not (watching or self.watching(computed)):
            return computed
        results = [self.alias(result) for result in computed]
        info = current_source_info()
        lost = [
            (array, describe(array))
            for record, first in begun.items()
            for array in find_closed_over(record, first, operands, computed)
        ]
        warn_of_lost(list(begun), lost, info)
        for record in watching:
            record.add(rule, operands, results, info)
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
        jax_rule = None
        if self.runs_rules_on_values and not rules_in_force():
            with set_current_trace(self.parent_trace):
                jax_rule = rule_of_jax(primitive, subfuns, args, params)
        if jax_rule is not None:
            results = list(self.apply(jax_rule.computation, args, self.watching(args)))
        else:
            with set_current_trace(self.parent_trace):
                traced = traced_rule(primitive, subfuns, args, params)
            results = self._run_traced_rule(*traced)
        # If the rule has run, because the parent or the tape differentiates it, forget the tree of
        # the function's results: JAX expects a tree from exactly one of the two.
        if _jax.has_run(subfuns[1]):
            _jax.forget_result_trees(subfuns[0])
        return results

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
        # Its rule is a Python function, which may read values that change after the call.
        computation.constants, computation.saves = constants, not facts.has_references
        return list(self.apply(computation, operands, watching))
