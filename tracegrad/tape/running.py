"""How operations run under tapes, and what records keep of them: arrays of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.tape.computations import Computation, without_donation
from tracegrad.tape.linearised import linearised
from tracegrad.tape.record import Record
from tracegrad.tracing.in_force import rules_in_force
from tracegrad.variables.overriding import ForwardingTrace

_JIT = _jax.JIT
set_current_trace = _jax.set_current_trace
current_source_info = _jax.current_source_info


class Running(ForwardingTrace):
    """A trace under which operations run as its parent runs them.

    Attributes:
      records: those that are told what runs.
      is_top: whether what runs under the parent runs at once.
    """

    def __init__(self, parent: Any):
        super().__init__(parent)
        self.records: list[Record] = []
        self.is_top = isinstance(parent, _jax.TopLevelTrace)

    def run(
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

    def run_and_save(
        self, computation: Computation, operands: Sequence[Any], watching: Sequence[Record]
    ) -> list[Any] | None:
        """Runs an operation that saves what its derivative needs; None if that cannot be.

        In a function that is being traced only what XLA would run twice: of the rest it makes one.
        """
        if not (computation.saves if self.is_top else computation.is_run_once):
            return None
        if rules_in_force() or not all(record.keeps_operations for record in watching):
            return None
        flowing = [i for i, operand in enumerate(operands) if _jax.has_gradient(operand)]
        active = tuple([i for i in flowing if any(r.tracks((operands[i],)) for r in watching)])
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
            run = forward.forward if self.is_top else forward.run_forward
            results = run(*operands)
        if not (self.is_top and is_jit):
            results = self.own_results(operands, results)
        info = current_source_info()
        for record in watching:
            record.add(forward, operands, results, info)
        return results[: forward.count]

    def record(
        self,
        computation: Computation,
        args: Sequence[Any],
        results: Sequence[Any],
        watching: Sequence[Record],
    ) -> list[Any]:
        """Adds an operation to records; returns its results, each an array of its own."""
        results = self.own_results(args, results)
        info = current_source_info()
        for record in watching:
            record.add(computation, args, results, info)
        return results

    def own_results(self, args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
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
                result = self.alias(result)
            own.add(id(result))
            fresh.append(result)
        return fresh

    def tracks(self, arrays: Sequence[Any]) -> bool:
        for record in self.records:  # noqa: SIM110 (this way takes half the time)
            if record.tracks(arrays):
                return True
        return False

    def is_tracked(self, array: Any) -> bool:
        return any(record.tracks((array,)) for record in self.records)

    def alias(self, array: Any) -> Any:
        with set_current_trace(self.parent_trace):
            return _jax.fresh_alias(array)

    def own_operands(self, primitive: Any, args: Sequence[Any]) -> list[Any]:
        """The operands as the record can hold them: a NumPy array may be changed by its owner."""
        refuse_references(primitive, args)
        if are_plain(args) or not any(isinstance(arg, np.ndarray) for arg in args):
            return list(args)
        with set_current_trace(self.parent_trace):
            return [jnp.array(arg) if isinstance(arg, np.ndarray) else arg for arg in args]


def refuse_references(primitive: Any, values: Sequence[Any]) -> None:
    if any(not _is_plain(value) and _jax.is_reference(jax.typeof(value)) for value in values):
        raise NotImplementedError(
            f"{primitive.name} of a jax.Ref with an array that a tape watches: what is written "
            "to a Ref outside of a compiled function cannot be followed. Use it inside a "
            "function compiled by jax.jit or tracegrad.trace"
        )


_IMMUTABLE = (bool, int, float, complex, np.generic, jax.Array)
# Of most operands it is known by their type that they can be held as they are.
PLAIN = {bool, int, float, complex}


def are_plain(values: Sequence[Any]) -> bool:
    for value in values:
        if type(value) not in PLAIN:
            if not isinstance(value, _IMMUTABLE) or _jax.is_tracer(value):
                return False
            PLAIN.add(type(value))
    return True


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*_IMMUTABLE, np.ndarray))
