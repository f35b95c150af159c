"""A JAX trace that lets every operation run on ordinary arrays and tells tapes of it.

One recorder stands on each underlying trace of a thread (none, or that of a function that is being
traced) and serves any number of tapes. Values stay what they are: `if`, `print` and NumPy work.
What JAX does not show to a trace is not recorded: programs compiled ahead of time, and other
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.rewriting.host_calls import TO_HOST
from tracegrad.tape.computations import (
    Computation,
    JaxRuleCall,
    JittedCall,
    computation_of,
    jax_rule_key,
    jitted_call,
    new_jitted_call,
    own_computation,
    rule_computation,
    sole_equation,
    without_donation,
)
from tracegrad.tape.direct_calls import NotDirect, direct_form
from tracegrad.tape.effects import reads_the_host
from tracegrad.tape.keys import PROGRAMS
from tracegrad.tape.lifting import closes_over_watched, lift
from tracegrad.tape.lost_gradients import lose_in, lost_around
from tracegrad.tape.record import Record
from tracegrad.tape.rules_on_values import ON_VALUES, Rule
from tracegrad.tape.running import PLAIN, Running, are_plain, refuse_references
from tracegrad.tracing.in_force import rules_in_force
from tracegrad.variables.capture import tell_of_assigned
from tracegrad.variables.overriding import Instead, OverridingTrace

_JIT = _jax.JIT
set_current_trace = _jax.set_current_trace
current_source_info = _jax.current_source_info


class Recorder(Running):
    """Runs every operation under `parent`, and adds it to the records that track an operand."""

    def __init__(self, parent: Any):
        super().__init__(parent)
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

    # ------------------------------------------------------------------ what JAX asks of a trace

    def process_primitive(
        self, primitive: Any, args: Sequence[Any], params: dict[str, Any], /
    ) -> Any:
        if self._overriding is not None:
            results = self._run_instead(self._overriding.instead, args, primitive, params, args)
            if results is not None:
                return results if primitive.multiple_results else results[0]
        # Called for every operation: what costs a microsecond here counts.
        if primitive is _JIT:
            call = jitted_call(params) or self._new_jitted_call(params)
            computation = call.computation
            if call.constants:
                return self._process_closure(call, args, params)
        elif primitive is TO_HOST:
            return self._end_gradient(primitive, args, params)
        elif primitive in _WITHOUT_PROGRAMS:
            if not self.tracks(args):
                with set_current_trace(self.parent_trace):
                    return primitive.bind(*args, **params)
            computation = computation_of(primitive, params)
        else:
            return self._process_any(primitive, args, params)
        computation.is_used = True
        if computation.run is None or not self.is_top or computation.saves:
            return self._process(computation, args, primitive, args, params)
        return self._run_compiled(computation, primitive, args)

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

    def _run_compiled(self, computation: Computation, primitive: Any, args: Sequence[Any]) -> Any:
        """Runs a compiled operation and records it: its results are new arrays, and there is
        nothing else to heed."""
        run = computation.run
        assert run is not None
        watching = [record for record in self.records if record.tracks(args)]
        for arg in args:
            if type(arg) not in PLAIN:
                args = self.own_operands(primitive, args) if watching else args
                break
        with set_current_trace(self.parent_trace):
            out = run(*args)
        if watching:
            info = current_source_info()
            made: Sequence[Any] = out if primitive.multiple_results else (out,)
            for record in watching:
                record.add(computation, args, made, info)
        return out

    def call_directly(
        self, jitted: Any, forms: dict[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if not self.is_top or len(self.records) != 1 or type(self.records[0]) is not Record:
            return None
        if rules_in_force() or _jax.config.jax_disable_jit:
            return None
        (record,) = self.records
        operands = jax.tree.leaves((args, kwargs))
        tracked = record.tracked
        active = tuple([i for i, operand in enumerate(operands) if id(operand) in tracked])
        form = forms.get(active)
        if form is None:
            if not active or len(forms) >= _MOST_FORMS:
                return None
            form = forms[active] = direct_form(jitted, active)
        if form is NotDirect or not are_plain(operands):
            return None
        tell_of_assigned(operands)
        try:
            with set_current_trace(self.parent_trace):
                arrays, call = form(*args, **kwargs)
        except NotDirect:
            forms[active] = NotDirect
            return None
        call.computation.is_used = True
        record.add(call.computation, operands, arrays, current_source_info())
        return jax.tree.unflatten(call.tree, arrays[: call.tree.num_leaves])

    def _process_closure(
        self, call: JittedCall, args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        """Runs a jitted function that closes over arrays: they are operands too."""
        if call.has_tracers:
            return list(self._process_any(_JIT, args, params))
        tell_of_assigned(call.constants)
        if call.refused:
            for record in self.records:
                for identity, error in call.refused.items():
                    if identity in record.tracked:
                        raise error
        call.computation.is_used = True
        results: list[Any] = self._process(
            call.computation, [*call.captured, *args], _JIT, args, params
        )
        return results

    def _process(
        self,
        computation: Computation,
        operands: Sequence[Any],
        primitive: Any,
        args: Sequence[Any],
        params: dict[str, Any],
    ) -> Any:
        """Runs an operation in whatever way it asks for, and records it.

        `operands` are those of the computation, `args` those of the primitive with these
        parameters.
        """
        if computation.programs:
            tell_of_assigned(operands)
        watching = [record for record in self.records if record.tracks(operands)]
        if not watching:
            return self.run(computation, operands, primitive, args, params)
        captured = operands[: len(operands) - len(args)]
        for arg in args:
            if type(arg) not in PLAIN:
                args = self.own_operands(primitive, args)
                operands = [*captured, *args]
                break
        if computation.has_effects and primitive is _JIT and reads_the_host(params):
            return self._run_program(params["jaxpr"], args)
        return self._run_watched(computation, operands, primitive, args, params, watching)

    def _run_watched(
        self,
        computation: Computation,
        operands: Sequence[Any],
        primitive: Any,
        args: Sequence[Any],
        params: dict[str, Any],
        watching: Sequence[Record],
    ) -> Any:
        """The same of an operation that records track, on operands that they can hold."""
        results = self.run_and_save(computation, operands, watching)
        if results is None:
            out = self.run(computation, operands, primitive, args, params)
            results = out if primitive.multiple_results else [out]
            refuse_references(primitive, results)
            results = self.record(computation, operands, results, watching)
        lose_in(watching, computation, operands, results)
        return results if primitive.multiple_results else results[0]

    # ---------------------------------------------------------------------------- rules on values

    @property
    def takes_rules(self) -> bool:
        """Whether what runs here runs on values, and all that is wanted of a rule is its gradient:
        the tangents of a `ForwardAccumulator` need its transpose, so that it is traced."""
        return self.is_top and all(record.keeps_operations for record in self.records)

    def before_rule(self) -> dict[Record, tuple[int, int]]:
        """How far each record is, before a function with a rule runs on values."""
        return {record: (len(record.steps), len(record.lost)) for record in self.records}

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
        watching = [record for record in self.records if record.tracks(operands)]
        if not computed or not (watching or self.tracks(computed)):
            return computed
        results = [self.alias(result) for result in computed]
        types = tuple(map(jax.typeof, results))
        params = {"name": rule.name, "results": types}
        computation, info = computation_of(ON_VALUES, params), current_source_info()
        for record in self.records:
            of = begun.get(record)
            lost = [] if of is None else lost_around(record, of, rule, operands, computed, info)
            if lost or record in watching:
                record.add_rule(rule, computation, operands, results, info, lost)
        return results

    def _new_jitted_call(self, params: dict[str, Any]) -> JittedCall:
        with set_current_trace(self.parent_trace):
            return new_jitted_call(params)

    def _process_any(self, primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        """Runs an operation that may have programs: a loop, a branch, or one not met before."""
        if not any(_jax.sub_programs(params)):
            _WITHOUT_PROGRAMS.add(primitive)
            return self.process_primitive(primitive, args, params)
        facts = _jax.facts_below(params)
        constants = facts.arrays
        tell_of_assigned((*constants, *args))
        captured = [c for c in constants if self.is_tracked(c)] if constants else []
        operands = [*captured, *args]
        watching = [r for r in self.records if r.tracks(operands)]
        if watching:
            args = self.own_operands(primitive, args)
            operands = [*captured, *args]
            if primitive is _JIT and facts.has_effects and reads_the_host(params):
                return self._run_program(params["jaxpr"], args)
        params = dict(without_donation(params))
        with set_current_trace(self.parent_trace):
            if not watching:
                return primitive.bind(*args, **params)
            computed = primitive, params
            if captured:
                computed = _JIT, lift(primitive, params, captured, args)
                if primitive is _jax.REMAT:  # not a call of one: it is differentiated as a whole
                    alone = sole_equation(computed[1]["jaxpr"])
                    computed = computed if alone is None else (primitive, alone.params)
            if any(map(_jax.is_tracer, constants)):  # gone with their transformation
                computation = Computation(*computed, is_shared=False)
            else:
                computation = computation_of(*computed)
        return self._run_watched(computation, operands, primitive, args, params, watching)

    def sees(self, args: Sequence[Any]) -> bool:
        return bool(self.records)  # it may read a Variable

    def _end_gradient(self, primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        """Runs an operation that hands on its operand, without recording it."""
        with set_current_trace(self.parent_trace):
            result = primitive.bind(*args, **params)
        return self.alias(result) if self.is_tracked(result) else result

    # ---------------------------------------------------------------------------- custom rules

    def run_rule(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        """Runs a function with a rule. It is traced first: as an equation it can be kept, and what
        it closes over shows as operands."""
        if self._overriding is not None:
            ask = self._overriding.rule_instead
            results = self._run_instead(ask, args, primitive, subfuns, params, args)
            if results is not None:
                return results
        if not self.records:
            with set_current_trace(self.parent_trace):
                return list(primitive.bind(*args, subfuns=subfuns, **params))
        fun, rule = subfuns[:2]
        key = jax_rule_key(primitive, subfuns, args, params)
        known = None if key is None else PROGRAMS.get(key)
        if known is not None:
            _jax.leave_result_trees(fun, known.result_trees)
            lone = known.lone
            if lone is not None and lone.run is not None and self.is_top:
                lone.is_used = True
                return list(self._run_compiled(lone, primitive, args))
        else:
            with set_current_trace(self.parent_trace):
                program = jax.make_jaxpr(lambda *a: primitive.bind(*a, subfuns=subfuns, **params))(
                    *args
                )
            known = JaxRuleCall(program, _jax.result_trees(fun))
            # What it closes over would be that of the first call only.
            if key is not None and not _jax.constants_of(program):
                PROGRAMS.put(key, known)
        results = self._run_program(known.program, args, is_new=key is None)
        # Its caller takes the tree of the results from the function or from its rule, and wants
        # just one of them to have run: the rule has, if the parent differentiates.
        if _jax.has_run(rule):
            _jax.forget_result_trees(fun)
        return results

    def _run_program(self, program: Any, args: Sequence[Any], *, is_new: bool = False) -> list[Any]:
        """Runs a program operation by operation; `is_new`: it was traced for this one run."""
        open_form, constants = _jax.parts_of(program)
        values = dict(zip(open_form.constvars, constants, strict=True))
        values.update(zip(open_form.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else values[atom]

        for equation in open_form.eqns:
            operands = [read(atom) for atom in equation.invars]
            if equation.primitive in (_jax.CUSTOM_JVP, _jax.CUSTOM_VJP):
                results = self._run_equation(equation, operands, is_new)
            else:
                out = self.process_primitive(equation.primitive, operands, equation.params)
                results = list(out) if equation.primitive.multiple_results else [out]
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in open_form.outvars]

    def _run_equation(self, equation: Any, args: Sequence[Any], is_new: bool) -> list[Any]:
        """Runs an equation that has a rule."""
        primitive, params = equation.primitive, equation.params
        constants = _jax.closed_over(params)
        closed_over = [*args[:constants], *_jax.facts_below(params).arrays]
        if any(r.tracks(closed_over) for r in self.records):
            raise closes_over_watched(_jax.function_of(params["call_jaxpr"]).name)
        watching = [r for r in self.records if r.tracks(args)]
        if not watching:
            with set_current_trace(self.parent_trace):
                return _jax.bind(primitive, args, params)
        args = self.own_operands(primitive, args)
        known = None if is_new else rule_computation(primitive, params, constants)
        computation = known or own_computation(equation)
        results = self.run_and_save(computation, args, watching)
        if results is None:
            with set_current_trace(self.parent_trace):
                results = _jax.bind(primitive, args, params)
            results = self.record(computation, args, results, watching)
        lose_in(watching, computation, args, results)
        return results


# A function whose arguments are watched in so many ways has no faster way for further ones.
_MOST_FORMS = 16
# Operations of these are without sub-programs.
_WITHOUT_PROGRAMS: set[Any] = set()
