"""Finds the Variables that a function reads and assigns while it is traced, and makes them inputs
and outputs of its program.

While a function is traced, a `Capture` listens. A read of a Variable returns a placeholder. JAX
takes the placeholder for a value of an outer trace, and makes it a constant of the program, even if
the read is in a loop or a nested jit. After the trace these constants become inputs of the program,
and the assigned values become outputs. JAX reuses no inner function that it cached in another
trace, or before an assignment (`kept_programs`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tracegrad import _jax
from tracegrad.ir.occurrence import Origin, calling_line
from tracegrad.variables import kept_programs
from tracegrad.variables.cut_gradients import cut_gradient, warn_if_cut, warn_of_cut
from tracegrad.variables.listening import Listener, start_listening, stop_listening
from tracegrad.variables.variable import Variable


# `read(value, entry)` returns `value`, the Variable's current value, as a new object for a reader;
# its derivative is that of `entry`, the Variable's value at the function's entry. So the gradient
# of the function with respect to a Variable (by a tape around the function, for example) is the sum
# over all values that were read, as outside of traced functions.
#
# Assignment is not differentiated: if `value` has a tangent and `entry` has none, a gradient is
# lost. A warning says so for a trainable Variable, with its `name` and the line of the assignment.
def _warn_of_lost(name: str, assigned_at: Origin | None) -> None:
    if name:
        warn_of_cut(name, assigned_at)


READ = _jax.standing_in_primitive("read", _warn_of_lost)
# The assigned value as a new object.
ASSIGNED = _jax.identity_primitive("assigned")


_OVER = (
    "the value of a Variable, read in a traced function, is used after the function was traced: it "
    "was kept outside of it, or a rule of a jax.custom_vjp or jax.custom_jvp reads the Variable. "
    "Return the value; pass it to the rule as an argument."
)


class Capture(Listener):
    """Records which Variables one traced function reads and assigns; listens while it runs.

    Attributes:
      assigned: the assigned Variables, in the order of their first assignment.
    """

    def __init__(self, trace: Any) -> None:
        """`trace`: of the function's program."""
        self.assigned: tuple[Variable, ...] = ()
        self._entry: dict[Variable, list[_jax.Placeholder]] = {}
        self._current: dict[Variable, Any] = {}  # the value assigned last
        self._assigned_at: dict[Variable, Origin | None] = {}  # the line of that assignment
        self._readable: dict[Variable, Any] = {}  # the object that readers get
        self._trace = trace
        self._placeholders = _jax.PlaceholderTrace()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Called after the function."""
        self._placeholders.is_over = _OVER
        # These references lead to the function, and back to this capture: the cycle would keep all
        # of them alive.
        self._trace = None
        self._current, self._readable = {}, {}

    def last_values(self) -> list[Any]:
        """Returns the last value of each assigned Variable; sets `assigned`."""
        self.assigned = tuple(self._current)
        # Assignments are not differentiated.
        return [_jax.undifferentiated(value) for value in self._current.values()]

    # ---------------------------------------------------------------------------------- listening

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        warn_if_cut(variable)
        if _jax.current_trace(None) is not self._trace and _jax.staging_trace() is None:
            raise RuntimeError(
                f"the Variable {variable.name!r} is read inside a traced function, by code that is "
                "computed at once and is not a part of the function's program: there the Variable "
                "has no value yet. Read it outside, or make that code a part of the program."
            )
        if variable not in self._readable:
            self._readable[variable] = self._read(variable)
        return self._readable[variable]

    def on_renewal(self, variable: Variable) -> bool:
        self._readable.pop(variable, None)
        return True

    def _read(self, variable: Variable) -> Any:
        """The current value, as a new object."""
        if variable not in self._current:
            return self._value_at_entry(variable)
        value = self._current[variable]
        if not _jax.has_gradient(variable._aval):
            return value
        entry = self._entry.get(variable) or [self._value_at_entry(variable)]
        with _jax.set_current_trace(self._trace):  # so that tapes in the function do not record it
            name = variable.name if variable.trainable else ""
            return READ.bind(value, entry[0], name=name, assigned_at=self._assigned_at[variable])

    def _value_at_entry(self, variable: Variable) -> _jax.Placeholder:
        value = _jax.Placeholder(self._placeholders, variable.aval, weakref.ref(variable))
        self._entry.setdefault(variable, []).append(value)
        return value

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        here = _jax.current_trace(None)
        if here is not self._trace and _jax.staging_trace() is not self._trace:
            raise RuntimeError(
                f"the Variable {variable.name!r} is assigned inside the body of a loop, a branch, "
                "a checkpoint or a nested jit, from where the value cannot get out. Carry the "
                "value: read it before, let the body take and return it, and assign the result, "
                f"as in `w, ys = jax.lax.scan(body, {variable.name}.value, xs); "
                f"{variable.name}.assign(w)`. For a nested function use `tracegrad.trace` in the "
                "place of `jax.jit`."
            )
        if _jax.is_tracer(value):
            # A new object, for tapes. If a value is being differentiated here, assign its primal.
            is_own = _jax.trace_of(value) is self._trace
            value = ASSIGNED.bind(value) if is_own else cut_gradient(variable, value)
            if here is not self._trace and _jax.is_tracer(value):
                self._refuse_inner(variable, value)
        else:
            value = _jax.fresh_alias(value)
        self._current[variable] = value
        self._assigned_at[variable] = calling_line()
        self._readable.pop(variable, None)

    def _refuse_inner(self, variable: Variable, value: Any) -> None:
        """Refuses a value that exists only in a transformation inside the function (`jax.vmap`)."""
        for trace in _jax.outward(_jax.current_trace(None), self._trace):
            if _jax.trace_of(value) is trace:
                raise RuntimeError(
                    f"the Variable {variable.name!r} is assigned inside "
                    f"{_transformation_name(trace)} a value that exists only there "
                    f"({_jax.type_text(value.aval)} of each). Return the value, and assign it "
                    "outside."
                )

    # ------------------------------------------------------------------------------------ program

    def with_explicit_inputs(self, program: Any) -> tuple[Any, list[Variable]]:
        """Adds an input, after the program's own, for each Variable whose value at entry is used.
        Returns the program, and these Variables in the order of their first reads."""
        variables = list(self._entry)
        if not variables:
            return program, []
        places = {id(value): i for i, of in enumerate(self._entry.values()) for value in of}
        avals = [values[0].aval for values in self._entry.values()]
        return _jax.with_inputs(program, avals, places), variables


@contextmanager
def capturing() -> Iterator[Capture]:
    """A block for the call of a function, inside the trace of its program."""
    capture = Capture(_jax.current_trace(None))
    start_listening(capture)
    try:
        with kept_programs.while_tracing():
            yield capture
    finally:
        stop_listening(capture)
        capture.end()


def _transformation_name(trace: Any) -> str:
    return "a jax.vmap" if "Batch" in type(trace).__name__ else "a transformation"


def variable_of(value: object) -> Variable | None:
    """Returns the Variable of a placeholder; None for any other value."""
    if isinstance(value, _jax.Placeholder):
        variable: Variable | None = value.stands_for()
        return variable
    return None
