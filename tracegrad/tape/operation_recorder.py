"""A JAX trace that runs each operation on ordinary arrays, and adds it to the records of tapes.

Each thread has one recorder for each underlying trace: the top level, or the trace of a function
that is being traced. The recorder serves any number of tapes. Arrays stay ordinary arrays: `if`,
`print` and NumPy work. The recorder does not record programs that are compiled ahead of time, and
operations of other threads, since JAX does not show them to a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.rewriting.host_calls import TO_HOST
from tracegrad.tape.computations import Computation
from tracegrad.tape.direct_calls import NotDirect, direct_form
from tracegrad.tape.known_computations import (
    computation_of,
    computation_with_programs,
    find_simple_call,
    without_donation,
)
from tracegrad.tape.lost_gradients import warn_of_lost_in_programs
from tracegrad.tape.programs import closes_over_watched, has_host_results
from tracegrad.tape.record import Record
from tracegrad.tracing.in_force import rules_in_force
from tracegrad.tracing.overriding import ForwardingTrace, Instead, OverridingTrace

_JIT = _jax.JIT
set_current_trace = _jax.set_current_trace
current_source_info = _jax.current_source_info


class OperationRecorder(ForwardingTrace):
    """Runs each operation under its parent, and adds it to the records that track an operand.

    Attributes:
      records: the records of the open tapes and accumulators, the outermost first.
      is_top: whether the parent is JAX's top level, which runs operations at once.
    """

    def __init__(self, parent: Any):
        super().__init__(parent)
        self.records: list[Record] = []
        self.is_top = isinstance(parent, _jax.TopLevelTrace)
        self._is_staged = any(isinstance(t, _jax.StagingTrace) for t in _jax.outward(parent))
        # The recorder sees an operation first, so it asks this parent for a replacement.
        self._overriding = parent if isinstance(parent, OverridingTrace) else None

    # ------------------------------------------------------------------------------ life

    def add(self, record: Record) -> None:
        """Starts recording; the first record installs the recorder on its parent."""
        if not self.is_installed:
            self.install()
        self.records.append(record)

    def remove(self, record: Record) -> None:
        """Stops recording for a record; the last record uninstalls the recorder."""
        self.records = [r for r in self.records if r is not record]
        self.leave()

    def leave(self) -> None:
        """Uninstalls the recorder if it serves no record.

        If recording ends inside a transformation that began later (the body of a jitted function),
        the recorder stays installed, since JAX returns to it when the transformation ends. The end
        of the tape's block then calls `leave` again.
        """
        if not self.records and self.is_installed and _jax.current_trace(None) is self:
            self.uninstall()

    @property
    def gives_back(self) -> bool:
        return self.is_top and len(self.records) == 1 and type(self.records[0]) is Record

    def call_jitted(
        self, jitted: Any, forms: dict[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls a jitted function, by its `direct_form` if the call allows it.

        `forms`: the direct forms of the function, or NotDirect, by active operands and orders.
        """
        operands = jax.tree.leaves((args, kwargs))
        watching = self.watching(operands)  # the one record, or none: see `gives_back`
        if not watching or rules_in_force() or _jax.config.jax_disable_jit:
            return jitted(*args, **kwargs)
        (record,) = watching
        key = record.active(operands), record.orders
        form = forms.get(key)
        if form is None and len(forms) < _MAX_FORMS:
            form = forms[key] = direct_form(jitted, *key)
        if form is None or form is NotDirect or not are_immutable(operands):
            return jitted(*args, **kwargs)
        try:
            with set_current_trace(self.parent_trace):
                results, call = form(*args, **kwargs)
        except NotDirect:
            forms[key] = NotDirect
            return jitted(*args, **kwargs)
        record.add(call.computation, operands, results, current_source_info())
        if call.computation.has_rules:
            warn_of_lost_in_programs(watching, call.computation, operands)
        return jax.tree.unflatten(call.tree, results[: call.tree.num_leaves])

    # ------------------------------------------------------------------ methods that JAX calls

    def process_primitive(
        self, primitive: Any, args: Sequence[Any], params: dict[str, Any], /
    ) -> Any:
        if self._overriding is not None:
            replaced = self.run_instead(self._overriding.instead, args, primitive, params, args)
            if replaced is not None:
                return replaced if primitive.multiple_results else replaced[0]
        results: Any
        # Called for every operation: each microsecond counts.
        if primitive in _WITHOUT_PROGRAMS:
            watching = self.watching(args)
            if not watching:
                with set_current_trace(self.parent_trace):
                    return primitive.bind(*args, **params)
            results = self.apply(computation_of(primitive, params), args, watching)
        elif primitive is _JIT:
            call = find_simple_call(params)
            watching = [] if call is None else self.watching(args)
            if call is None or not watching:
                return self._process_programs(primitive, args, params)
            return self.apply(call, args, watching)
        elif primitive is TO_HOST:
            return self._end_gradient(primitive, args, params)
        elif not _jax.sub_programs(params):
            _WITHOUT_PROGRAMS.add(primitive)
            return self.process_primitive(primitive, args, params)
        else:
            results = self._process_programs(primitive, args, params)
        return results if primitive.multiple_results else results[0]

    def _process_programs(
        self, primitive: Any, args: Sequence[Any], params: Mapping[str, Any]
    ) -> Sequence[Any]:
        """Runs an operation with programs; arrays that the programs close over become operands."""
        is_jit = primitive is _JIT
        facts = _jax.program_facts(params["jaxpr"]) if is_jit else _jax.facts_below(params)
        captured: Sequence[Any] = facts.arrays
        watching = self.watching([*captured, *args])
        if not watching and (not is_jit or facts.has_effects or self._is_staged):
            with set_current_trace(self.parent_trace):
                return _bind(primitive, args, without_donation(params))
        if is_jit:
            captured = (*captured, *facts.numpy_arrays)
        else:
            captured = [c for c in captured if self.watching((c,))]
        with set_current_trace(self.parent_trace):
            computation = computation_with_programs(primitive, params, captured, facts)
        if not watching and computation.saves:  # run the program that JAX itself has compiled
            with set_current_trace(self.parent_trace):
                return _bind(primitive, args, without_donation(params))
        for identity, function in computation.refused.items():
            if any(identity in record.tracked for record in self.records):
                raise closes_over_watched(function)
        reads_host = is_jit and facts.has_effects and has_host_results(params["jaxpr"])
        if reads_host and not self._may_save(watching):  # run it operation by operation
            with set_current_trace(self):
                return _jax.eval_program(params["jaxpr"], args)
        results: Sequence[Any] = self.apply(computation, [*computation.captured, *args], watching)
        return results

    def _may_save(self, watching: Sequence[Record]) -> bool:
        """Whether the operation may save residuals: rules in force and accumulators forbid it."""
        return not rules_in_force() and all(record.keeps_operations for record in watching)

    def watching(self, operands: Sequence[Any]) -> list[Record]:
        return [record for record in self.records if record.note_use(operands)]

    def apply(
        self, computation: Computation, operands: Sequence[Any], watching: Sequence[Record]
    ) -> Any:
        """Runs and records a computation; returns the results without residuals."""
        if not _SEEN_IMMUTABLE.issuperset(map(type, operands)):
            operands = self.copy_mutable_operands(computation.name, operands)
        saves = computation.saves if self.is_top else computation.is_run_once
        with set_current_trace(self.parent_trace):
            if saves and watching and self._may_save(watching):
                computation = self._with_residuals(computation, operands, watching)
            run = computation.inlined if self._is_staged else computation.run
            out = run(*operands)
        if not watching:
            return out
        is_list = type(out) is list
        if is_list and self.is_top and computation.is_compiled:  # the common case: new arrays
            results = out
        else:
            results = out if is_list else jax.tree.leaves(out)
            results = self._make_results_distinct(computation, operands, results)
            out = results if is_list else jax.tree.unflatten(jax.tree.structure(out), results)
        if computation.tree is not None:
            out = jax.tree.unflatten(computation.tree, results[: computation.count])
        info = current_source_info()
        for record in watching:
            record.add(computation, operands, results, info)
        if computation.has_rules:
            warn_of_lost_in_programs(watching, computation, operands)
        return out

    def _with_residuals(
        self, computation: Computation, operands: Sequence[Any], watching: Sequence[Record]
    ) -> Computation:
        """Returns the computation's `forward`, which saves residuals."""
        active = active_operands(operands, watching)
        groups: tuple[tuple[int, ...], ...] = (active,)
        if len(watching) > 1 and computation.has_rules and not computation.has_effects:
            each = {record.active(operands) for record in watching}
            groups = tuple(sorted(each | {active}, key=lambda group: (len(group), group)))
        if not active:
            return computation
        orders = sum([record.orders for record in watching])
        return computation.forward(groups, operands, orders)

    def _make_results_distinct(
        self, computation: Computation, args: Sequence[Any], results: Sequence[Any]
    ) -> list[Any]:
        """Makes each result a JAX array, and no object that is an operand or another result.

        If an operation returns its operand itself (a reshape to the same shape), the result must be
        another object, since the two have different gradients. If a checkpointed function returns a
        constant of its program that is no JAX array yet, the constant becomes an array here: else
        each operation that reads the constant would make a new array.
        """
        seen = set(map(id, args))
        fresh = []
        for result in results:
            if not isinstance(result, jax.Array):
                refuse_reference_operands(computation.name, [result])
                with set_current_trace(self.parent_trace):
                    result = jnp.asarray(result)
            if id(result) in seen:
                result = self.alias(result)
            seen.add(id(result))
            fresh.append(result)
        return fresh

    def copy_mutable_operands(self, name: str, operands: Sequence[Any]) -> Sequence[Any]:
        """Copies NumPy arrays, which others may change, for records to hold."""
        if are_immutable(operands):
            return operands
        refuse_reference_operands(name, operands)
        with set_current_trace(self.parent_trace):
            return [jnp.array(x) if isinstance(x, np.ndarray) else x for x in operands]

    def alias(self, array: Any) -> Any:
        with set_current_trace(self.parent_trace):
            return _jax.fresh_alias(array)

    def sees(self, args: Sequence[Any]) -> bool:
        return bool(self.records)  # it may read a Variable

    def _end_gradient(self, primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        """Runs the marker of a value for the host (an identity) without recording it, so that no
        gradient goes through the marker."""
        with set_current_trace(self.parent_trace):
            result = primitive.bind(*args, **params)
        return self.alias(result) if self.watching([result]) else result

    def run_instead(
        self, find: Callable[..., Instead | None], args: Sequence[Any], *operation: Any
    ) -> list[Any] | None:
        """Runs the replacement that `find` returns for an operation; returns None without one."""
        with set_current_trace(self.parent_trace):
            instead = find(*operation)
        if instead is None:
            return None
        with set_current_trace(self):
            return instead(*args)


def active_operands(operands: Sequence[Any], watching: Sequence[Record]) -> tuple[int, ...]:
    """Returns the positions of the operands that may be differentiated for any of the records."""
    if len(watching) == 1:
        return watching[0].active(operands)
    return tuple(sorted({i for record in watching for i in record.active(operands)}))


def _bind(primitive: Any, args: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    out = primitive.bind(*args, **params)
    return list(out) if primitive.multiple_results else [out]


def refuse_reference_operands(name: str, values: Sequence[Any]) -> None:
    plain = (*_IMMUTABLE, np.ndarray)
    if any(not isinstance(x, plain) and _jax.is_reference(jax.typeof(x)) for x in values):
        raise NotImplementedError(
            f"{name} uses a jax.Ref and an array that a tape watches: a tape cannot follow what is "
            "written to a Ref outside of a compiled function. Use the Ref inside a function "
            "compiled by jax.jit or tracegrad.trace"
        )


_MAX_FORMS = 64  # direct forms of a jitted function: one for each set of followed operands
_IMMUTABLE = (bool, int, float, complex, np.generic, jax.Array)
# The types of immutable values, as far as seen: a record holds such a value without copying it.
_SEEN_IMMUTABLE = {bool, int, float, complex}


def are_immutable(values: Sequence[Any]) -> bool:
    """Whether nobody can write to any of the values."""
    for value in values:
        if type(value) not in _SEEN_IMMUTABLE:
            if not isinstance(value, _IMMUTABLE) or _jax.is_tracer(value):
                return False
            _SEEN_IMMUTABLE.add(type(value))
    return True


# The primitives seen so far whose operations have no programs.
_WITHOUT_PROGRAMS: set[Any] = set()
