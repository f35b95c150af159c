"""A JAX trace that lets every operation run on ordinary arrays and tells tapes of it.

One recorder stands on each underlying trace of a thread (none, or that of a function that is being
traced) and serves any number of tapes. Values stay what they are: `if`, `print` and NumPy work.
What JAX does not show to a trace is not recorded: programs compiled ahead of time, and other
threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.rewriting.host_calls import TO_HOST
from tracegrad.tape.computations import (
    Computation,
    JittedCall,
    computation_of,
    jitted_call,
    new_jitted_call,
    own_computation,
    rule_computation,
    sole_equation,
    without_donation,
)
from tracegrad.tape.direct_calls import NotDirect, direct_form
from tracegrad.tape.effects import has_effects, reads_the_host
from tracegrad.tape.keys import is_jaxs_own, settings_now
from tracegrad.tape.lifting import captured_arrays, lift
from tracegrad.tape.linearised import linearised
from tracegrad.tape.programs import PROGRAMS
from tracegrad.tape.record import Record
from tracegrad.tape.rules_on_values import ON_VALUES, Rule
from tracegrad.tracing.importer import sub_programs
from tracegrad.tracing.in_force import rules_in_force
from tracegrad.variables.capture import tell_of_assigned
from tracegrad.variables.overriding import ForwardingTrace, OverridingTrace

_JIT = _jax.JIT
set_current_trace = _jax.set_current_trace
current_source_info = _jax.current_source_info
_config = _jax.config


class Recorder(ForwardingTrace):
    """Runs every operation under `parent`, and adds it to the records that track an operand."""

    def __init__(self, parent: Any):
        super().__init__(parent)
        self.records: list[Record] = []
        self._installed: Any = None
        self.is_top = isinstance(parent, _jax.TopLevelTrace)
        # Sees operations before what it stands on does, which may put others in their place.
        self._overriding = parent if isinstance(parent, OverridingTrace) else None

    # ------------------------------------------------------------------------------ life

    @property
    def is_installed(self) -> bool:
        """Whether it stands on its parent."""
        return self._installed is not None

    def add(self, record: Record) -> None:
        """Starts recording; the first record puts the recorder on top of its parent."""
        if self._installed is None:
            self._installed = self.in_place()
            self._installed.__enter__()
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
        if self.records or self._installed is None:
            return
        if _jax.current_trace(None) is self:
            installed, self._installed = self._installed, None
            installed.__exit__(None, None, None)

    # ------------------------------------------------------------------ what JAX asks of a trace

    def process_primitive(
        self, primitive: Any, args: Sequence[Any], params: dict[str, Any], /
    ) -> Any:
        if self._overriding is not None:
            with set_current_trace(self.parent_trace):
                instead = self._overriding.instead(primitive, params, args)
            if instead is not None:
                with set_current_trace(self):
                    results = instead(*args)
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
            if not self._tracks(args):
                with set_current_trace(self.parent_trace):
                    return primitive.bind(*args, **params)
            computation = computation_of(primitive, params)
        else:
            return self._process_any(primitive, args, params)
        computation.is_used = True
        if computation.run is None or not self.is_top or computation.saves:
            return self._process(computation, args, primitive, args, params)
        return self._run_compiled(computation, primitive, args)

    def _run_compiled(self, computation: Computation, primitive: Any, args: Sequence[Any]) -> Any:
        """Runs a compiled operation and records it: its results are new arrays, and there is
        nothing else to heed."""
        run = computation.run
        assert run is not None
        watching = [record for record in self.records if record.tracks(args)]
        for arg in args:
            if type(arg) not in _PLAIN:
                args = self._own_operands(primitive, args) if watching else args
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
        if rules_in_force() or _config.jax_disable_jit:
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
        if form is NotDirect or not _are_plain(operands):
            return None
        tell_of_assigned(operands)
        try:
            with set_current_trace(self.parent_trace):
                told = form(*args, **kwargs)
        except NotDirect:
            forms[active] = NotDirect
            return None
        origin, results = told.origin, told.results
        origin.computation.is_used = True
        record.add(origin.computation, operands, results, current_source_info())
        return jax.tree.unflatten(origin.tree, results[: origin.count])

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
            return self._run(computation, operands, primitive, args, params)
        captured = operands[: len(operands) - len(args)]
        for arg in args:
            if type(arg) not in _PLAIN:
                args = self._own_operands(primitive, args)
                operands = [*captured, *args]
                break
        if computation.has_effects and primitive is _JIT and reads_the_host(params):
            return self._run_program(params["jaxpr"], args)
        if computation.saves:
            results = self._run_and_save(computation, operands, watching)
            if results is not None:
                return results if primitive.multiple_results else results[0]
        out = self._run(computation, operands, primitive, args, params)
        results = out if primitive.multiple_results else [out]
        _refuse_references(primitive, results)
        results = self._record(computation, operands, results, watching)
        return results if primitive.multiple_results else results[0]

    def _run(
        self,
        computation: Computation,
        operands: Sequence[Any],
        primitive: Any,
        args: Sequence[Any],
        params: dict[str, Any],
    ) -> Any:
        """Runs an operation, in the fastest way that there is."""
        with set_current_trace(self.parent_trace):
            if computation.run is not None and self.is_top:
                return computation.run(*operands)
            return primitive.bind(*args, **without_donation(params))

    def _run_and_save(
        self, computation: Computation, operands: Sequence[Any], watching: Sequence[Record]
    ) -> list[Any] | None:
        """Runs an operation that saves what its derivative needs; None if that cannot be.

        In a function that is being traced only what XLA would run twice: of the rest it makes one.
        """
        if not (computation.saves if self.is_top else computation.is_run_once):
            return None
        if rules_in_force() or not all(record.keeps_operations for record in watching):
            return None
        active = tuple(
            [
                i
                for i, operand in enumerate(operands)
                if any(r.tracks((operand,)) for r in watching) and _jax.has_gradient(operand)
            ]
        )
        if not active:
            return None
        # What a further derivative needs is dropped by XLA if nobody takes it; here it would be
        # computed, so that it is only for those where a second run would be wrong.
        may_be_dropped = computation.has_effects or not self.is_top
        orders = sum(record.orders for record in watching) if may_be_dropped else len(watching)
        is_jit = computation.primitive is _JIT
        with set_current_trace(self.parent_trace):
            forward = linearised(
                computation,
                active,
                None if is_jit else list(map(jax.typeof, operands)),
                orders,
                is_kept=self.is_top,
                is_last=sum(record.orders for record in watching) == 1,
            )
            if forward is None:
                return None
            if self.is_top:
                results = forward.forward(*operands)
            else:
                results = forward.run_forward(operands)
        if not (self.is_top and is_jit):
            results = self._own_results(operands, results)
        info = current_source_info()
        for record in watching:
            record.add(forward, operands, results, info)
        return results[: forward.count]

    # ---------------------------------------------------------------------------- rules on values

    @property
    def takes_rules(self) -> bool:
        """Whether what runs here runs on values, and all that is wanted of a rule is its gradient:
        the tangents of a `ForwardAccumulator` need its transpose, so that it is traced."""
        return self.is_top and all(record.keeps_operations for record in self.records)

    def with_rule(
        self, rule: Rule, operands: Sequence[Any], results: Sequence[Any]
    ) -> Sequence[Any]:
        """What a function has computed of operands, as results that have a rule.

        They are other arrays than those that it has computed, and connected to operands only.
        """
        watching = [record for record in self.records if record.tracks(operands)]
        if not results or not (watching or self._tracks(results)):
            return results
        results = [self._alias(result) for result in results]
        types = tuple(map(jax.typeof, results))
        params = {"name": rule.name, "results": types}
        computation, info = computation_of(ON_VALUES, params), current_source_info()
        for record in watching:
            record.add_rule(rule, computation, operands, results, info)
        return results

    def _new_jitted_call(self, params: dict[str, Any]) -> JittedCall:
        with set_current_trace(self.parent_trace):
            return new_jitted_call(params)

    def _process_any(self, primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        """Runs an operation that may have programs: a loop, a branch, or one not met before."""
        if not any(sub_programs(params)):
            _WITHOUT_PROGRAMS.add(primitive)
            return self.process_primitive(primitive, args, params)
        constants = captured_arrays(params)
        tell_of_assigned((*constants, *args))
        captured = [c for c in constants if self._is_tracked(c)] if constants else []
        operands = [*captured, *args]
        watching = [r for r in self.records if r.tracks(operands)]
        if watching:
            args = self._own_operands(primitive, args)
            operands = [*captured, *args]
            if primitive is _JIT and has_effects(params) and reads_the_host(params):
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
        if computation.saves:
            found = self._run_and_save(computation, operands, watching)
            if found is not None:
                return found if primitive.multiple_results else found[0]
        with set_current_trace(self.parent_trace):
            out = primitive.bind(*args, **params)
        results = list(out) if primitive.multiple_results else [out]
        _refuse_references(primitive, results)
        results = self._record(computation, operands, results, watching)
        return results if primitive.multiple_results else results[0]

    def process_shard_map(
        self, primitive: Any, fun: Any, args: Sequence[Any], /, **params: Any
    ) -> Any:
        # What the mapped function closes over cannot be seen, so any tracked array may be in it.
        if any(record.tracked for record in self.records):
            raise NotImplementedError(
                "a jax.shard_map called directly under a tape cannot be recorded: call it inside "
                "a function compiled by jax.jit or tracegrad.trace"
            )
        return super().process_shard_map(primitive, fun, args, **params)

    # ------------------------------------------------------------------------------ recording

    def _record(
        self,
        computation: Computation,
        args: Sequence[Any],
        results: Sequence[Any],
        watching: Sequence[Record],
    ) -> list[Any]:
        """Adds an operation to records; returns its results, each an array of its own."""
        results = self._own_results(args, results)
        info = current_source_info()
        for record in watching:
            record.add(computation, args, results, info)
        return results

    def _own_results(self, args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """The results, each an array of its own.

        An operation may return the very array that it was given (a reshape to the same shape). The
        result is another value with a gradient of its own: it gets its own identity. And of a
        checkpointed function JAX hands on a constant as it stands in the program, which is no array
        yet: each operation that reads it would make another one of it.
        """
        own = {id(arg) for arg in args}
        fresh = []
        for result in results:
            if not isinstance(result, jax.Array):
                with set_current_trace(self.parent_trace):
                    result = jnp.asarray(result)
            if id(result) in own:
                result = self._alias(result)
            own.add(id(result))
            fresh.append(result)
        return fresh

    def _end_gradient(self, primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        """Runs an operation that hands on its operand, without recording it."""
        with set_current_trace(self.parent_trace):
            result = primitive.bind(*args, **params)
        return self._alias(result) if self._is_tracked(result) else result

    def _tracks(self, arrays: Sequence[Any]) -> bool:
        for record in self.records:  # noqa: SIM110 (this way takes half the time)
            if record.tracks(arrays):
                return True
        return False

    def _is_tracked(self, array: Any) -> bool:
        return any(record.tracks((array,)) for record in self.records)

    def _alias(self, array: Any) -> Any:
        with set_current_trace(self.parent_trace):
            return _jax.fresh_alias(array)

    def _own_operands(self, primitive: Any, args: Sequence[Any]) -> list[Any]:
        """The operands as the record can hold them: a NumPy array may be changed by its owner."""
        _refuse_references(primitive, args)
        if _are_plain(args) or not any(isinstance(arg, np.ndarray) for arg in args):
            return list(args)
        with set_current_trace(self.parent_trace):
            return [jnp.array(arg) if isinstance(arg, np.ndarray) else arg for arg in args]

    # ---------------------------------------------------------------------------- custom rules

    def run_rule(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        """Runs a function with a rule. It is traced first: as an equation it can be kept, and what
        it closes over shows as operands."""
        if self._overriding is not None:
            with set_current_trace(self.parent_trace):
                instead = self._overriding.rule_instead(primitive, subfuns, params, args)
            if instead is not None:
                with set_current_trace(self):
                    return instead(*args)
        if not self.records:
            with set_current_trace(self.parent_trace):
                return list(primitive.bind(*args, subfuns=subfuns, **params))
        fun, rule = subfuns[:2]
        key = _own_rule_key(primitive, subfuns, args, params)
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
            known = _OwnRule(program, _jax.result_trees(fun))
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
        open_form = _jax.opened(program)
        values = dict(zip(open_form.constvars, _jax.constants_of(program), strict=True))
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
        watching = [r for r in self.records if r.tracks(args)]
        if not watching:
            with set_current_trace(self.parent_trace):
                return _jax.bind(primitive, args, params)
        constants = int(params.get("num_consts", 0))
        if primitive is _jax.CUSTOM_JVP and any(r.tracks(args[:constants]) for r in watching):
            raise ValueError(
                f"the custom derivative of {_jax.function_of(params['call_jaxpr']).name} closes "
                "over an array that a tape watches: its rule cannot tell the derivative with "
                "respect to it. Pass the array as an argument"
            )
        args = self._own_operands(primitive, args)
        if is_new:
            computation = own_computation(equation)
        else:
            computation = rule_computation(primitive, params, constants)
        if computation.saves:
            found = self._run_and_save(computation, args, watching)
            if found is not None:
                return found
        with set_current_trace(self.parent_trace):
            results = _jax.bind(primitive, args, params)
        return self._record(computation, args, results, watching)


def _refuse_references(primitive: Any, values: Sequence[Any]) -> None:
    if any(not _is_plain(value) and _jax.is_reference(jax.typeof(value)) for value in values):
        raise NotImplementedError(
            f"{primitive.name} of a jax.Ref with an array that a tape watches: what is written "
            "to a Ref outside of a compiled function cannot be followed. Use it inside a "
            "function compiled by jax.jit or tracegrad.trace"
        )


_IMMUTABLE = (bool, int, float, complex, np.generic, jax.Array)
# Of most operands it is known by their type that they can be held as they are.
_PLAIN = {bool, int, float, complex}
# A function whose arguments are watched in so many ways has no faster way for further ones.
_MOST_FORMS = 16
# Operations of these are without sub-programs.
_WITHOUT_PROGRAMS: set[Any] = set()


def _are_plain(values: Sequence[Any]) -> bool:
    for value in values:
        if type(value) not in _PLAIN:
            if not isinstance(value, _IMMUTABLE) or _jax.is_tracer(value):
                return False
            _PLAIN.add(type(value))
    return True


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*_IMMUTABLE, np.ndarray))


# -------------------------------------------------------------------------------- what is called


class _OwnRule:
    """A call of a function of JAX's own that has a rule (relu, softplus, ...).

    Attributes:
      program: what it traces to.
      result_trees: what a run of the function leaves behind.
      lone: what the program computes, if it is just the call of that rule: to be compiled.
    """

    __slots__ = ("lone", "program", "result_trees")

    def __init__(self, program: Any, result_trees: tuple[Any, ...]):
        self.program = program
        self.result_trees = result_trees
        self.lone: Computation | None = None
        call = sole_equation(program)
        is_rule = call is not None and call.primitive in (_jax.CUSTOM_JVP, _jax.CUSTOM_VJP)
        if call is not None and is_rule and not call.params.get("num_consts", 0):
            self.lone = rule_computation(call.primitive, call.params)


def _own_rule_key(
    primitive: Any, subfuns: Sequence[Any], args: Sequence[Any], params: dict[str, Any]
) -> Any:
    """What tells one call of a function of JAX's own from another; None for anybody else's.

    Somebody else's function may read what has changed since its last call, so that it is traced at
    each, as JAX does.
    """
    functions, trees = _jax.rule_functions(subfuns)
    if params.get("symbolic_zeros") or trees is None or not all(map(is_jaxs_own, functions)):
        return None
    return _OwnRule, primitive, functions, trees, tuple(map(_jax.type_key, args)), settings_now()


# ------------------------------------------------------------------------------ one per thread


class _Kept(threading.local):
    def __init__(self) -> None:
        self.recorders: list[Recorder] = []


_kept = _Kept()
_MOST_KEPT = 8  # as many as tapes stand in one another where a transformation is stepped out of


def recorder_here() -> Recorder:
    """The recorder on top of the current trace of this thread; if there is none, one for it."""
    current = _jax.current_trace(None)
    if isinstance(current, Recorder):
        return current
    if not isinstance(current, _jax.TopLevelTrace):
        return Recorder(current)
    # One serves all tapes that come one after the other: the caches of jitted functions have an
    # entry for every trace that they were called under, and take longer the more there are.
    for recorder in _kept.recorders:
        if not recorder.is_installed and recorder.parent_trace is current:
            return recorder
    recorder = Recorder(current)
    if len(_kept.recorders) < _MOST_KEPT:
        _kept.recorders.append(recorder)
    return recorder


@contextmanager
def unrecorded() -> Iterator[None]:
    """No tape sees what is inside it: it goes to whatever is around the recorders."""
    trace = _jax.current_trace(None)
    while isinstance(trace, Recorder):
        trace = trace.parent_trace
    with set_current_trace(trace):
        yield


def with_stand_ins(arrays: Sequence[Any], chosen: Sequence[bool]) -> list[Any]:
    """The arrays, in the place of each chosen one another one of its type.

    It is computed from nothing, and its value is not used. The records that are on take it for a
    source where the array is one.
    """
    trace = _jax.current_trace(None)
    recorder = trace if isinstance(trace, Recorder) else None
    with set_current_trace(trace if recorder is None else recorder.parent_trace):
        found = [
            _stand_in(array) if is_chosen else array
            for array, is_chosen in zip(arrays, chosen, strict=True)
        ]
    for array, stand_in in zip(arrays, found, strict=True):
        if recorder is not None and stand_in is not array:
            for record in recorder.records:
                if record.tracks([array]):
                    record.add_stand_in(stand_in, array)
    return found


def _stand_in(array: Any) -> Any:
    return jnp.zeros_like(array) if _jax.is_tracer(array) else _jax.fresh_alias(array)
