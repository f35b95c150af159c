"""A JAX trace that lets every operation run on ordinary arrays and tells tapes of it.

One recorder stands on each underlying trace of a thread (none, or that of a function that is being
traced) and serves any number of tapes. Values stay what they are: `if`, `print` and NumPy work.
What JAX does not show to a trace is not recorded: programs compiled ahead of time, and other
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.tape.keys import params_key
from tracegrad.tape.lifting import captured_arrays, lift
from tracegrad.tape.record import Operation, Record


class Recorder(jax.core.Trace):
    """Runs every operation under `parent`, and adds it to the records that track an operand."""

    def __init__(self, parent: Any):
        super().__init__()  # type: ignore[no-untyped-call]
        self.parent = parent
        self.records: list[Record] = []
        self._installed: Any = None

    # ------------------------------------------------------------------------------ life

    def add(self, record: Record) -> None:
        """Starts recording; the first record puts the recorder on top of its parent."""
        if not self.records:
            self._installed = _jax.set_current_trace(self)
            self._installed.__enter__()
        self.records.append(record)

    def remove(self, record: Record) -> None:
        """Stops recording; the last record takes the recorder away."""
        self.records = [r for r in self.records if r is not record]
        if not self.records and self._installed is not None:
            installed, self._installed = self._installed, None
            installed.__exit__(None, None, None)

    # ------------------------------------------------------------------ what JAX asks of a trace

    def stage_value(self, value: Any) -> Any:
        with _jax.set_current_trace(self.parent):
            return self.parent.stage_value(value)

    def process_primitive(
        self, primitive: Any, args: Sequence[Any], params: dict[str, Any], /
    ) -> Any:
        if primitive.name == "shard_map":
            self._refuse_shard_map(args)
        params = _without_donation(params)
        with _jax.set_current_trace(self.parent):
            out = primitive.bind(*args, **params)
        captured = [c for c in captured_arrays(params) if self._is_tracked(c)]
        watching = [r for r in self.records if r.tracks(args) or r.tracks(captured)]
        if not watching:
            return out
        results = list(out) if primitive.multiple_results else [out]
        if captured:
            with _jax.set_current_trace(self.parent):
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

    # ------------------------------------------------------------------------------ recording

    def _record(
        self,
        primitive: Any,
        params: dict[str, Any],
        args: Sequence[Any],
        results: Sequence[Any],
        watching: Sequence[Record],
        constants: int = 0,
    ) -> list[Any]:
        """Adds an operation to records; returns its results, each an array of its own."""
        # An operation may return the very array that it was given (a reshape to the same shape).
        # The result is another value with a gradient of its own: it gets its own identity.
        own = {id(arg) for arg in args}
        fresh = [self._alias(r) if id(r) in own else r for r in results]
        operation = Operation(
            primitive,
            params,
            tuple(args),
            tuple(fresh),
            _jax.current_source_info(),
            (primitive, params_key(params)),
            constants,
        )
        for record in watching:
            record.add(operation)
        return fresh

    def _is_tracked(self, array: Any) -> bool:
        return any(record.tracks((array,)) for record in self.records)

    def _alias(self, array: Any) -> Any:
        with _jax.set_current_trace(self.parent):
            return _jax.alias(array)

    def _run_rule(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        """Runs a function with a rule. It is traced first: as an equation it can be kept, and what
        it closes over shows as operands."""
        with _jax.set_current_trace(self.parent):
            if not any(r.tracked for r in self.records):
                return list(primitive.bind(*args, subfuns=subfuns, **params))
            program = jax.make_jaxpr(lambda *a: primitive.bind(*a, subfuns=subfuns, **params))(
                *args
            )
        open_form = _jax.opened(program)
        values = dict(zip(open_form.constvars, _jax.constants_of(program), strict=True))
        values.update(zip(open_form.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else values[atom]

        for equation in open_form.eqns:
            operands = [read(atom) for atom in equation.invars]
            if equation.primitive is primitive:
                results = self._run_equation(primitive, dict(equation.params), operands)
            else:
                out = self.process_primitive(equation.primitive, operands, equation.params)
                results = list(out) if equation.primitive.multiple_results else [out]
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in open_form.outvars]

    def _run_equation(
        self, primitive: Any, params: dict[str, Any], args: Sequence[Any]
    ) -> list[Any]:
        with _jax.set_current_trace(self.parent):
            results = _jax.bind(primitive, args, params)
        watching = [r for r in self.records if r.tracks(args)]
        if not watching:
            return results
        constants = int(params.get("num_consts", 0))
        if primitive is _jax.CUSTOM_JVP and any(r.tracks(args[:constants]) for r in watching):
            raise ValueError(
                f"the custom derivative of {_jax.function_name(params['call_jaxpr'])} closes over "
                "an array that a tape watches: its rule cannot tell the derivative with respect to "
                "it. Pass the array as an argument"
            )
        return self._record(primitive, params, args, results, watching, constants)

    def _refuse_shard_map(self, args: Sequence[Any]) -> None:
        if any(r.tracks(args) for r in self.records):
            raise NotImplementedError(
                "a jax.shard_map called directly under a tape cannot be recorded: call it inside "
                "a function compiled by jax.jit or tracegrad.trace"
            )


# -------------------------------------------------------------------------------- what is called


def _without_donation(params: dict[str, Any]) -> dict[str, Any]:
    """A tape still needs the arguments of a compiled function: none is given up under it."""
    donated = params.get("donated_invars")
    if donated and any(donated):
        return {**params, "donated_invars": (False,) * len(donated)}
    return params


# ------------------------------------------------------------------------------ one per thread


def recorder_here() -> Recorder:
    """The recorder on top of the current trace of this thread; a new one if there is none."""
    current = _jax.current_trace(None)
    return current if isinstance(current, Recorder) else Recorder(current)
