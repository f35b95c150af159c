"""A JAX trace that lets every operation run on ordinary arrays and tells tapes of it.

One recorder stands on each underlying trace of a thread (none, or that of a function that is being
traced) and serves any number of tapes. Values stay what they are: `if`, `print` and NumPy work.
What JAX does not show to a trace is not recorded: programs compiled ahead of time, and other
threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Source
from tracegrad.ir.dependence import is_reference
from tracegrad.rewriting.host_calls import TO_HOST
from tracegrad.tape.effects import reads_the_host
from tracegrad.tape.keys import Remembered, is_jaxs_own, settings_now
from tracegrad.tape.lifting import captured_arrays, constants_below, lift
from tracegrad.tape.record import Operation, Record
from tracegrad.tracing.capture import tell_of_assigned
from tracegrad.tracing.importer import make_node, sub_programs
from tracegrad.tracing.overriding import OverridingTrace


class Recorder(jax.core.Trace):
    """Runs every operation under `parent`, and adds it to the records that track an operand."""

    def __init__(self, parent: Any):
        super().__init__()  # type: ignore[no-untyped-call]
        self.parent_trace = parent
        self.records: list[Record] = []
        self._installed: Any = None
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
            self._installed = _jax.set_current_trace(self)
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

    def stage_value(self, value: Any) -> Any:
        with _jax.set_current_trace(self.parent_trace):
            return self.parent_trace.stage_value(value)

    def process_primitive(
        self, primitive: Any, args: Sequence[Any], params: dict[str, Any], /
    ) -> Any:
        if self._overriding is not None:
            with _jax.set_current_trace(self.parent_trace):
                instead = self._overriding.instead(primitive, params, args)
            if instead is not None:
                with _jax.set_current_trace(self):
                    results = instead(*args)
                return results if primitive.multiple_results else results[0]
        if primitive is TO_HOST:
            return self._end_gradient(primitive, args, params)
        params = _without_donation(params)
        is_jit = primitive is _jax.JIT
        constants = constants_below(params["jaxpr"]) if is_jit else captured_arrays(params)
        if any(sub_programs(params)):
            tell_of_assigned((*constants, *args))
        captured = [c for c in constants if self._is_tracked(c)] if constants else []
        watching = [r for r in self.records if r.tracks(args) or (captured and r.tracks(captured))]
        if not watching:
            with _jax.set_current_trace(self.parent_trace):
                return primitive.bind(*args, **params)
        args = self._own_operands(primitive, args)
        if is_jit and _jax.opened(params["jaxpr"]).effects and reads_the_host(params):
            return self._run_program(params["jaxpr"], args)
        with _jax.set_current_trace(self.parent_trace):
            out = primitive.bind(*args, **params)
        results = list(out) if primitive.multiple_results else [out]
        _refuse_references(primitive, results)
        if captured:
            with _jax.set_current_trace(self.parent_trace):
                lifted = lift(primitive, params, captured, args)
            args = [*captured, *args]
            results = self._record(_jax.JIT, lifted, args, results, watching)
        else:
            results = self._record(primitive, params, args, results, watching)
        return results if primitive.multiple_results else results[0]

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, args: Sequence[Any], /, **params: Any
    ) -> list[Any]:
        return self._run_rule(primitive, (fun, jvp), args, params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, args: Sequence[Any], /, **params: Any
    ) -> list[Any]:
        return self._run_rule(primitive, (fun, fwd, bwd), args, params)

    def process_shard_map(
        self, primitive: Any, fun: Any, args: Sequence[Any], /, **params: Any
    ) -> Any:
        # What the mapped function closes over cannot be seen, so any tracked array may be in it.
        if any(record.tracked for record in self.records):
            raise NotImplementedError(
                "a jax.shard_map called directly under a tape cannot be recorded: call it inside "
                "a function compiled by jax.jit or tracegrad.trace"
            )
        with _jax.set_current_trace(self.parent_trace):
            return self.parent_trace.process_shard_map(primitive, fun, args, **params)

    # ------------------------------------------------------------------------------ recording

    def _record(
        self,
        primitive: Any,
        params: dict[str, Any],
        args: Sequence[Any],
        results: Sequence[Any],
        watching: Sequence[Record],
        constants: int = 0,
        rule: CustomGradient | None = None,
    ) -> list[Any]:
        """Adds an operation to records; returns its results, each an array of its own."""
        # An operation may return the very array that it was given (a reshape to the same shape).
        # The result is another value with a gradient of its own: it gets its own identity.
        own = {id(arg) for arg in args}
        fresh = []
        for result in results:
            if id(result) in own:
                result = self._alias(result)
            own.add(id(result))
            fresh.append(result)
        operation = Operation(
            primitive,
            params,
            tuple(args),
            tuple(fresh),
            _jax.current_source_info(),
            constants,
            rule,
        )
        for record in watching:
            record.add(operation)
        return fresh

    def _end_gradient(self, primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        """Runs an operation that hands on its operand, without recording it."""
        with _jax.set_current_trace(self.parent_trace):
            result = primitive.bind(*args, **params)
        return self._alias(result) if self._is_tracked(result) else result

    def _is_tracked(self, array: Any) -> bool:
        return any(record.tracks((array,)) for record in self.records)

    def _alias(self, array: Any) -> Any:
        with _jax.set_current_trace(self.parent_trace):
            return _jax.fresh_alias(array)

    def _own_operands(self, primitive: Any, args: Sequence[Any]) -> list[Any]:
        """The operands as the record can hold them: a NumPy array may be changed by its owner."""
        _refuse_references(primitive, args)
        if not any(isinstance(arg, np.ndarray) for arg in args):
            return list(args)
        with _jax.set_current_trace(self.parent_trace):
            return [jnp.array(arg) if isinstance(arg, np.ndarray) else arg for arg in args]

    # ---------------------------------------------------------------------------- custom rules

    def _run_rule(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        """Runs a function with a rule. It is traced first: as an equation it can be kept, and what
        it closes over shows as operands."""
        if self._overriding is not None:
            with _jax.set_current_trace(self.parent_trace):
                instead = self._overriding.rule_instead(primitive, subfuns, params, args)
            if instead is not None:
                with _jax.set_current_trace(self):
                    return instead(*args)
        fun, rule = subfuns[:2]
        key = _own_rule_key(primitive, subfuns, args, params)
        if not self.records:
            with _jax.set_current_trace(self.parent_trace):
                return list(primitive.bind(*args, subfuns=subfuns, **params))
        known = None if key is None else _own_rules.get(key)
        if known is not None:
            program, stores = known
            _jax.leave_result_trees(fun, stores)
        else:
            with _jax.set_current_trace(self.parent_trace):
                program = jax.make_jaxpr(lambda *a: primitive.bind(*a, subfuns=subfuns, **params))(
                    *args
                )
            # What it closes over would be that of the first call only.
            if key is not None and not _jax.constants_of(program):
                _own_rules.put(key, (program, _jax.result_trees(fun)))
        results = self._run_program(program, args, is_new=key is None)
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
        primitive, params = equation.primitive, dict(equation.params)
        watching = [r for r in self.records if r.tracks(args)]
        if not watching:
            with _jax.set_current_trace(self.parent_trace):
                return _jax.bind(primitive, args, params)
        constants = int(params.get("num_consts", 0))
        if primitive is _jax.CUSTOM_JVP and any(r.tracks(args[:constants]) for r in watching):
            raise ValueError(
                f"the custom derivative of {_jax.function_name(params['call_jaxpr'])} closes over "
                "an array that a tape watches: its rule cannot tell the derivative with respect to "
                "it. Pass the array as an argument"
            )
        args = self._own_operands(primitive, args)
        with _jax.set_current_trace(self.parent_trace):
            results = _jax.bind(primitive, args, params)
        rule = _node_of(equation) if is_new else None
        return self._record(primitive, params, args, results, watching, constants, rule)


def _refuse_references(primitive: Any, values: Sequence[Any]) -> None:
    if any(not _is_plain(value) and is_reference(jax.typeof(value)) for value in values):
        raise NotImplementedError(
            f"{primitive.name} of a jax.Ref with an array that a tape watches: what is written "
            "to a Ref outside of a compiled function cannot be followed. Use it inside a "
            "function compiled by jax.jit or tracegrad.trace"
        )


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex | np.ndarray | np.generic | jax.Array)


# -------------------------------------------------------------------------------- what is called


def _without_donation(params: dict[str, Any]) -> dict[str, Any]:
    """A tape still needs the arguments of a compiled function: none is given up under it."""
    donated = params.get("donated_invars")
    if donated and any(donated):
        return {**params, "donated_invars": (False,) * len(donated)}
    return params


# The programs of JAX's own functions with rules (relu, softplus, ...).
_own_rules = Remembered(1024)


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
    types = tuple(map(_jax.type_key, args))
    return primitive, functions, trees, types, settings_now()


def _node_of(equation: Any) -> CustomGradient:
    node = make_node(
        equation.primitive,
        equation.params,
        tuple(_inputs(equation)),
        Source(equation.source_info, equation.ctx),
        (),
        {},
    )
    assert isinstance(node, CustomGradient)
    return node


def _inputs(equation: Any) -> list[Any]:
    graph = Graph("operands")
    return [graph.add_input(atom.aval) for atom in equation.invars]


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
    if type(current) is not _jax.top_level_trace_type():
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
    with _jax.set_current_trace(trace):
        yield
