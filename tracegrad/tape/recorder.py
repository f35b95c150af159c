"""A JAX trace that lets every operation run on ordinary arrays and tells tapes of it.

One recorder stands on each underlying trace of a thread (none, or that of a function that is being
traced) and serves any number of tapes. Values stay what they are: `if`, `print` and NumPy work.
What JAX does not show to a trace is not recorded: programs compiled ahead of time, and other
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.ir.dependence import joined
from tracegrad.rewriting.host_calls import TO_HOST
from tracegrad.tape.computations import (
    Computation,
    computation_of,
    computation_of_rule,
    computation_with_programs,
    links_of,
    without_donation,
)
from tracegrad.tape.effects import reads_the_host
from tracegrad.tape.lost_gradients import lose, lose_in, lost_around, lost_operands
from tracegrad.tape.made_rules import parts_of_rule
from tracegrad.tape.programs import RULES, closes_over_watched
from tracegrad.tape.record import Record
from tracegrad.tape.rules_of_jax import rule_of_jax
from tracegrad.tape.rules_on_values import Rule
from tracegrad.tracing.in_force import rules_in_force
from tracegrad.variables.capture import tell_of_assigned
from tracegrad.variables.overriding import ForwardingTrace, Instead, OverridingTrace

_JIT = _jax.JIT
set_current_trace = _jax.set_current_trace
current_source_info = _jax.current_source_info


class Recorder(ForwardingTrace):
    """Runs every operation under its parent, and adds it to the records that track an operand.

    Attributes:
      records: those that are told what runs.
      is_top: whether what runs under the parent runs at once.
    """

    def __init__(self, parent: Any):
        super().__init__(parent)
        self.records: list[Record] = []
        self.is_top = isinstance(parent, _jax.TopLevelTrace)
        self._is_staged = any(isinstance(t, _jax.StagingTrace) for t in _jax.outward(parent))
        # Sees operations before what it stands on does, which may put others in their place.
        self._overriding = parent if isinstance(parent, OverridingTrace) else None

    # ------------------------------------------------------------------------------ life

    def add(self, record: Record) -> None:
        """Starts recording; the first record puts the recorder on top of its parent."""
        if not self.is_installed:
            self.install()
        self.records.append(record)

    def remove(self, record: Record) -> None:
        """Stops recording; the last record takes the recorder away."""
        self.records = [r for r in self.records if r is not record]
        self.leave()

    def leave(self) -> None:
        """Takes the recorder away if it serves no record.

        Inside a transformation that began later (the body of a jitted function that ends the
        recording) it stays, since that will go back to it; the end of the tape's block calls this
        once more.
        """
        if not self.records and self.is_installed and _jax.current_trace(None) is self:
            self.uninstall()

    @property
    def gives_back(self) -> bool:
        return self.is_top and len(self.records) == 1 and type(self.records[0]) is Record

    # ------------------------------------------------------------------ what JAX asks of a trace

    def process_primitive(
        self, primitive: Any, args: Sequence[Any], params: dict[str, Any], /
    ) -> Any:
        if self._overriding is not None:
            found = self._run_instead(self._overriding.instead, args, primitive, params, args)
            if found is not None:
                return found if primitive.multiple_results else found[0]
        results: Any
        # Called for every operation: what costs a microsecond here counts.
        if primitive in _WITHOUT_PROGRAMS:
            watching = self._watching(args)
            if not watching:
                with set_current_trace(self.parent_trace):
                    return primitive.bind(*args, **params)
            results = self.apply(computation_of(primitive, params), args, watching)
        elif primitive is TO_HOST:
            return self._end_gradient(primitive, args, params)
        elif primitive is not _JIT and not _jax.sub_programs(params):
            _WITHOUT_PROGRAMS.add(primitive)
            return self.process_primitive(primitive, args, params)
        else:
            results = self._process_programs(primitive, args, params)
        return results if primitive.multiple_results else results[0]

    def _process_programs(
        self, primitive: Any, args: Sequence[Any], params: Mapping[str, Any]
    ) -> Sequence[Any]:
        """Runs an operation that has programs: what they close over are operands too."""
        is_jit = primitive is _JIT
        facts = _jax.program_facts(params["jaxpr"]) if is_jit else _jax.facts_below(params)
        captured: Sequence[Any] = facts.arrays
        tell_of_assigned((*captured, *args))
        watching = self._watching([*captured, *args])
        if not watching and (not is_jit or facts.has_effects or self._is_staged):
            with set_current_trace(self.parent_trace):
                return _bind(primitive, args, without_donation(params))
        if is_jit:
            captured = (*captured, *facts.numpy_arrays)
        else:
            captured = [c for c in captured if self._watching((c,))]
        with set_current_trace(self.parent_trace):
            computation = computation_with_programs(primitive, params, captured)
        if not watching and computation.saves:  # it shares what JAX has compiled
            with set_current_trace(self.parent_trace):
                return _bind(primitive, args, without_donation(params))
        for identity, function in computation.refused.items():
            if any(identity in record.tracked for record in self.records):
                raise closes_over_watched(function)
        reads = is_jit and facts.has_effects and reads_the_host(params)
        if reads and not self._may_save(watching):
            return self._run_program(params["jaxpr"], args)
        results: Sequence[Any] = self.apply(computation, [*computation.captured, *args], watching)
        return results

    def _may_save(self, watching: Sequence[Record]) -> bool:
        """Whether what a derivative needs may be saved: rules need the operation as it is, and an
        accumulator carries tangents through that."""
        return not rules_in_force() and all(record.keeps_operations for record in watching)

    def _watching(self, operands: Sequence[Any]) -> list[Record]:
        return [record for record in self.records if record.tracks(operands)]

    def apply(
        self, computation: Computation, operands: Sequence[Any], watching: Sequence[Record]
    ) -> Any:
        """Runs a computation and records it; returns its own results, as it gives them."""
        for operand in operands:
            if type(operand) not in PLAIN:
                operands = self._own_operands(computation.name, operands)
                break
        saves = computation.saves if self.is_top else computation.is_run_once
        with set_current_trace(self.parent_trace):
            if saves and watching and self._may_save(watching):
                active = _active(operands, watching)
                groups: tuple[tuple[int, ...], ...] = (active,)
                if len(watching) > 1 and computation.has_rules and not computation.has_effects:
                    each = {record.active(operands) for record in watching}
                    groups = tuple(sorted(each | {active}, key=lambda one: (len(one), one)))
                if active:
                    orders = sum([record.orders for record in watching])
                    computation = computation.forward(groups, operands, orders)
            run = computation.fun if self._is_staged else computation.run
            out = run(*operands)
        if not watching:
            return out
        is_list = type(out) is list
        results = self._own_results(computation, operands, out if is_list else jax.tree.leaves(out))
        if computation.tree is not None:
            out = jax.tree.unflatten(computation.tree, results[: computation.count])
        else:
            out = results if is_list else jax.tree.unflatten(jax.tree.structure(out), results)
        info = current_source_info()
        for record in watching:
            record.add(computation, operands, results, info)
        if computation.has_rules:
            lose_in(watching, computation, operands, results)
        return out

    def _own_results(
        self, computation: Computation, args: Sequence[Any], results: Sequence[Any]
    ) -> list[Any]:
        """The results, each an array of its own.

        An operation may return the very array that it was given (a reshape to the same shape). The
        result is another value with a gradient of its own: it gets its own identity. And of a
        checkpointed function JAX hands on a constant as it stands in the program, which is no array
        yet: each operation that reads it would make another one of it.
        """
        own = set(map(id, args))
        fresh = []
        for result in results:
            if not isinstance(result, jax.Array):
                refuse_references(computation.name, [result])
                with set_current_trace(self.parent_trace):
                    result = jnp.asarray(result)
            if id(result) in own:
                result = self.alias(result)
            own.add(id(result))
            fresh.append(result)
        return fresh

    def _own_operands(self, name: str, operands: Sequence[Any]) -> Sequence[Any]:
        """The operands as a record can hold them: a NumPy array may be changed by its owner."""
        refuse_references(name, operands)
        if are_plain(operands) or not any(isinstance(x, np.ndarray) for x in operands):
            return operands
        with set_current_trace(self.parent_trace):
            return [jnp.array(x) if isinstance(x, np.ndarray) else x for x in operands]

    def alias(self, array: Any) -> Any:
        """Another array object for the same value."""
        with set_current_trace(self.parent_trace):
            return _jax.fresh_alias(array)

    def sees(self, args: Sequence[Any]) -> bool:
        return bool(self.records)  # it may read a Variable

    def _end_gradient(self, primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        """Runs an operation that hands on its operand, without recording it."""
        with set_current_trace(self.parent_trace):
            result = primitive.bind(*args, **params)
        return self.alias(result) if self._watching([result]) else result

    def _run_instead(
        self, ask: Callable[..., Instead | None], args: Sequence[Any], *of: Any
    ) -> list[Any] | None:
        """The results of what runs in the place of an operation; None if that itself runs."""
        with set_current_trace(self.parent_trace):
            instead = ask(*of)
        if instead is None:
            return None
        with set_current_trace(self):
            return instead(*args)

    # ---------------------------------------------------------------------------- rules on values

    @property
    def takes_rules(self) -> bool:
        """Whether what runs here runs on values, and all that is wanted of a rule is its gradient:
        the tangents of a `ForwardAccumulator` need its transpose, so that it is traced."""
        return self.is_top and all(record.keeps_operations for record in self.records)

    def before_rule(self) -> dict[Record, tuple[int, int]]:
        """How far each record is, before a function with a rule runs on values."""
        return {record: (len(record.entries), len(record.lost)) for record in self.records}

    def with_rule(
        self,
        rule: Rule,
        operands: Sequence[Any],
        computed: Sequence[Any],
        begun: Mapping[Record, tuple[int, int]],
    ) -> Sequence[Any]:
        """What a function has computed of operands, as results that have a rule.

        They are other arrays than those that it has computed, and connected to operands only.
        `begun`: from `before_rule`.
        """
        watching = self._watching(operands)
        if not computed or not (watching or self._watching(computed)):
            return computed
        results = [self.alias(result) for result in computed]
        info = current_source_info()
        for record in self.records:
            of = begun.get(record)
            lost = [] if of is None else lost_around(record, of, rule, operands, computed, info)
            if lost or record in watching:
                record.add(rule, operands, results, info)
                record.add_lost(lost)
        return results

    def run_rule(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        """Runs a function of JAX's that has a rule."""
        if self._overriding is not None:
            ask = self._overriding.rule_instead
            results = self._run_instead(ask, args, primitive, subfuns, params, args)
            if results is not None:
                return results
        if not self.records:
            with set_current_trace(self.parent_trace):
                return list(primitive.bind(*args, subfuns=subfuns, **params))
        if self.takes_rules and not rules_in_force():
            with set_current_trace(self.parent_trace):
                known = rule_of_jax(primitive, subfuns, args, params)
            if known is not None:
                return list(self.apply(known.computation, args, self._watching(args)))
            return self._run_rule_on_values(primitive, subfuns, args, params)
        return self._run_traced_rule(primitive, subfuns, args, params)

    def _run_rule_on_values(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        """Has JAX differentiate the function: its rule runs forward on values now, and backward
        when a gradient gets there. Tapes further out record both, since they differentiate that."""
        operands = self._own_operands(str(getattr(subfuns[0], "__name__", primitive.name)), args)
        watching = self._watching(operands)
        active = _active(operands, watching)
        name = getattr(_jax.rule_functions(subfuns)[0][0], "__name__", primitive.name)
        followed = [record for record in self.records if not isinstance(record, Spy)]
        spies = [Spy(record, operands) for record in followed]

        def bind(*operands: Any) -> list[Any]:
            return list(primitive.bind(*operands, subfuns=subfuns, **params))

        def called(*operands: Any) -> list[Any]:
            for fun in subfuns[:2]:
                _jax.forget_result_trees(fun)
            return bind(*operands)

        met: set[int] = set()  # the operands for which the rule has given a gradient, no None

        def witnessed(operands: list[Any]) -> list[Any]:
            return bind(*_jax.with_witnesses(operands, 0, met))

        inner = watching[-1] if watching else None
        with _StandingAside(self, inner, spies), set_current_trace(self):
            if active:
                try:
                    results, vjp = _jax.vjp_of_some(witnessed, operands, active)
                except Exception as error:
                    if "closed-over value" in str(error):
                        raise closes_over_watched(self._name_of(called, operands)) from error
                    raise
            else:
                results = subfuns[0].call_wrapped(*operands)
        if any(spy.has_seen for spy in spies):
            raise closes_over_watched(self._name_of(called, operands))
        if not active:
            return list(results)
        types = list(map(jax.typeof, results))

        def pull_back(cotangents: Sequence[Any], sparse: Sequence[bool]) -> list[Any]:
            every = [ct if ct is not None else _zeros(aval) for ct, aval in zip(cotangents, types)]
            met.clear()
            found = dict(zip(active, vjp(every), strict=True))
            each = [found.get(i) if i in met else None for i in range(len(operands))]
            if primitive is _jax.CUSTOM_JVP and not met.issuperset(active):
                zeros = _written_zeros(called, operands, [ct is not None for ct in cotangents])
                each = [zeros.get(i) if ct is None else ct for i, ct in enumerate(each)]
            return each

        at = {id(x): i for i, x in enumerate(operands)}
        handed_on = {k: at[id(r)] for k, r in enumerate(results) if id(r) in at}
        rule = Rule(name, called, pull_back, handed_on=handed_on)
        results = [self.alias(result) for result in results]
        info = current_source_info()
        for record in watching:
            record.add(rule, operands, results, info)
        parts = parts_of_rule(subfuns[2]) if primitive is _jax.CUSTOM_VJP else None
        if parts is not None and parts.closed_over:
            kept = [(fun, _jax.result_trees(fun)) for fun in subfuns[:2] if _jax.has_run(fun)]
            with set_current_trace(self.parent_trace):
                found = lost_operands(called, list(map(jax.typeof, operands)))
            for fun in subfuns[:2]:
                _jax.forget_result_trees(fun)
            for fun, trees in kept:  # its caller takes the tree of the results from there
                _jax.leave_result_trees(fun, trees)
            lose(watching, found, operands, results)
        return results

    def _name_of(self, called: Callable[..., list[Any]], operands: Sequence[Any]) -> str:
        """The name of the function with a rule that a call is of."""
        with set_current_trace(self.parent_trace):
            program = jax.make_jaxpr(called)(*operands)
        rules = [e for e in _jax.opened(program).eqns if e.primitive in RULES]
        return str(_jax.function_of(rules[0].params["call_jaxpr"]).name) if rules else "a function"

    def _run_traced_rule(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        """Runs a function with a rule as the equation that it is traced to: so it can be kept, and
        what it closes over shows as operands."""
        with set_current_trace(self.parent_trace):
            program = jax.make_jaxpr(lambda *a: primitive.bind(*a, subfuns=subfuns, **params))(
                *args
            )
        results = self._run_program(program, args)
        # Its caller takes the tree of the results from the function or from its rule, and wants
        # just one of them to have run: the rule has, if the parent differentiates.
        fun, rule = subfuns[:2]
        if _jax.has_run(rule):
            _jax.forget_result_trees(fun)
        return results

    def _run_program(self, program: Any, args: Sequence[Any]) -> list[Any]:
        """Runs a program operation by operation."""
        open_form, constants = _jax.parts_of(program)
        values = dict(zip(open_form.constvars, constants, strict=True))
        values.update(zip(open_form.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else values[atom]

        for equation in open_form.eqns:
            operands = [read(atom) for atom in equation.invars]
            if equation.primitive in RULES:
                results = self._run_equation(equation, operands)
            else:
                out = self.process_primitive(equation.primitive, operands, equation.params)
                results = list(out) if equation.primitive.multiple_results else [out]
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in open_form.outvars]

    def _run_equation(self, equation: Any, args: Sequence[Any]) -> list[Any]:
        """Runs an equation that has a rule."""
        primitive, params = equation.primitive, equation.params
        constants = _jax.closed_over(params)
        facts = _jax.facts_below(params)
        if self._watching([*args[:constants], *facts.arrays]):
            raise closes_over_watched(_jax.function_of(params["call_jaxpr"]).name)
        watching = self._watching(args)
        if not watching:
            with set_current_trace(self.parent_trace):
                return _jax.bind(primitive, args, params)
        with set_current_trace(self.parent_trace):
            computation = computation_of_rule(primitive, params)
        computation.constants = constants
        return list(self.apply(computation, args, watching))


class Spy(Record):
    """Stands for a record while a function with a rule runs on values: has what the record follows
    been used, that is no operand?"""

    def __init__(self, record: Record, operands: Sequence[Any]):
        super().__init__(orders=0)
        self.has_seen = False
        self._followed, self._last = record.tracked, len(record.arrays)
        self._own = set(map(id, operands))

    def tracks(self, arrays: Any) -> bool:
        for array in arrays:
            slot = self._followed.get(id(array))
            if slot is not None and slot < self._last and id(array) not in self._own:
                self.has_seen = True
        return False


class _StandingAside:
    """A block in which the innermost record does not see a forward function that calls the function
    that it is of: once for each derivative of one another that it may see."""

    def __init__(self, recorder: Recorder, inner: Record | None, spies: Sequence[Spy]):
        self._recorder, self._inner, self._spies = recorder, inner, spies

    def __enter__(self) -> None:
        self._records = self._recorder.records
        inner = self._inner
        if inner is not None:
            inner.orders -= 1
        seeing = [r for r in self._records if r is not inner or r.orders > 0]
        self._recorder.records = [*seeing, *self._spies]

    def __exit__(self, *exception: object) -> None:
        if self._inner is not None:
            self._inner.orders += 1
        self._recorder.records = self._records


def _active(operands: Sequence[Any], watching: Sequence[Record]) -> tuple[int, ...]:
    """The places of the operands of which derivatives may be wanted."""
    if len(watching) == 1:
        return watching[0].active(operands)
    return tuple(sorted({i for record in watching for i in record.active(operands)}))


def _written_zeros(
    called: Callable[..., list[Any]], operands: Sequence[Any], given: Sequence[bool]
) -> dict[int, Any]:
    """The zeros, by operand, that a rule of tangents has written for some of the results."""
    with set_current_trace(_jax.current_trace_outside_of(Recorder)):
        rows = links_of(called, list(map(jax.typeof, operands)))
    linked = joined(compress(rows, given))
    return {i: jnp.zeros_like(x) for i, x in enumerate(operands) if linked >> i & 1}


def _zeros(aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype) if _jax.has_gradient(aval) else _jax.no_cotangent(aval)


def _bind(primitive: Any, args: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    out = primitive.bind(*args, **params)
    return list(out) if primitive.multiple_results else [out]


def refuse_references(name: str, values: Sequence[Any]) -> None:
    """Raises NotImplementedError if one of the values is a `jax.Ref`."""
    if any(not _is_plain(value) and _jax.is_reference(jax.typeof(value)) for value in values):
        raise NotImplementedError(
            f"{name} of a jax.Ref with an array that a tape watches: what is written to a Ref "
            "outside of a compiled function cannot be followed. Use it inside a function compiled "
            "by jax.jit or tracegrad.trace"
        )


_IMMUTABLE = (bool, int, float, complex, np.generic, jax.Array)
# Of most operands it is known by their type that they can be held as they are.
PLAIN = {bool, int, float, complex}


def are_plain(values: Sequence[Any]) -> bool:
    """Whether nobody can write to the values."""
    for value in values:
        if type(value) not in PLAIN:
            if not isinstance(value, _IMMUTABLE) or _jax.is_tracer(value):
                return False
            PLAIN.add(type(value))
    return True


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*_IMMUTABLE, np.ndarray))


# Operations of these are without sub-programs.
_WITHOUT_PROGRAMS: set[Any] = set()
