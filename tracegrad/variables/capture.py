"""The Variables that a function reads and assigns while it is traced: found, and made explicit.

While a function is traced a `Capture` listens. Whoever reads a Variable gets a placeholder, which
JAX takes for a value of an outer trace: the program has it as a constant, wherever in the function,
its helpers, its loops or its nested jits the read may be. Afterwards these constants become inputs
of the program, and assigned values outputs. No inner function is used that JAX has kept from
another trace, or from before an assignment (`kept_programs`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tracegrad import _jax
from tracegrad.ir.occurrence import calling_line
from tracegrad.variables import kept_programs
from tracegrad.variables.cut_gradients import (
    assigned_anew,
    warn_if_cut,
    warn_of_cut,
    without_gradient,
)
from tracegrad.variables.listening import Listener, listening
from tracegrad.variables.variable import Variable


# What a Variable gives to who reads it as a value of its own, and the Variable's value at the
# function's entry: `read(value, entry)` is the first, and is differentiated as the second. So
# whoever differentiates the function with respect to a Variable, as a tape around it does, gets the
# sum over all the values that were read of it, as outside of traced functions.
#
# What is assigned is not differentiated: if it has a tangent and the Variable has none, a gradient
# is lost. That is told of trainable Variables, by their `name` and the line of the assignment.
def _lost(name: str, assigned_at: str) -> None:
    if name:
        warn_of_cut(name, assigned_at)


READ = _jax.standing_in_primitive("read", _lost)
# What a Variable was assigned, as another object than the value that it is.
ASSIGNED = _jax.identity_primitive("assigned")


class _Life:
    """Whether the function of a capture is running; outlives it where its placeholders do."""

    runs = False

    def check(self) -> None:
        if not self.runs:
            raise RuntimeError(
                "the value of a Variable, read in a traced function, is used after the function "
                "was traced: it was kept outside of it, or a rule of a jax.custom_vjp or "
                "jax.custom_jvp reads the Variable. Return the value; pass it to the rule as an "
                "argument."
            )


class Capture(Listener):
    """What one traced function does with Variables; listens while the function runs.

    Attributes:
      assigned: the Variables that are assigned, in the order of their first assignment.
    """

    def __init__(self) -> None:
        self.assigned: tuple[Variable, ...] = ()
        self._entry: dict[Variable, list[_jax.Placeholder]] = {}
        self._current: dict[Variable, Any] = {}  # what was assigned last
        self._assigned_at: dict[Variable, str] = {}
        self._readable: dict[Variable, Any] = {}  # what readers get
        self._trace: Any = None
        self._life = _Life()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """A block inside the trace of the function's program, in which it is called."""
        self._trace = _jax.current_trace(None)
        self._life.runs = True
        try:
            with kept_programs.while_tracing(), listening(self):
                yield
        finally:
            self._life.runs = False
            # They know the function, which has this: a circle, that would keep alive what it holds.
            self._trace = None
            self._current, self._readable = {}, {}

    def last_values(self) -> list[Any]:
        """The new value of each Variable that was assigned."""
        self.assigned = tuple(self._current)
        # Assignments are not differentiated.
        return [_jax.undifferentiated(value) for value in self._current.values()]

    # ---------------------------------------------------------------------------------- listening

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        warn_if_cut(variable)
        if _jax.staging_trace() is None:
            raise RuntimeError(
                f"the Variable {variable.name!r} is read inside a traced function, where something "
                "is computed at once and not as a part of its program: there it has no value yet. "
                "Read it outside, or compute that in the program."
            )
        if variable not in self._readable:
            self._readable[variable] = self._read(variable)
        return self._readable[variable]

    def on_renewal(self, variable: Variable) -> bool:
        self._readable.pop(variable, None)
        return True

    def _read(self, variable: Variable) -> Any:
        """The value of a Variable, as an object of its own."""
        if variable not in self._current:
            return self._value_at_entry(variable)
        value = self._current[variable]
        if not _jax.has_gradient(variable):
            return value
        entry = self._entry.get(variable) or [self._value_at_entry(variable)]
        with _jax.set_current_trace(self._trace):  # not seen by tapes inside the function
            name = variable.name if variable.trainable else ""
            return READ.bind(value, entry[0], name=name, assigned_at=self._assigned_at[variable])

    def _value_at_entry(self, variable: Variable) -> _jax.Placeholder:
        value = _jax.Placeholder(variable.aval, weakref.ref(variable), self._life.check)
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
            # Another object, for tapes; of a value that is being differentiated here, JAX gives the
            # plain value.
            is_own = _jax.trace_of(value) is self._trace
            value = ASSIGNED.bind(value) if is_own else without_gradient(variable, value)
            if here is not self._trace and _jax.is_tracer(value):
                self._refuse_inner(variable, value)
        else:
            assigned_anew(variable)
            value = _jax.fresh_alias(value)
        self._current[variable] = value
        line = calling_line()
        self._assigned_at[variable] = "" if line is None else line.place
        self._readable.pop(variable, None)

    def _refuse_inner(self, variable: Variable, value: Any) -> None:
        """Raises for a value of a transformation inside the function, such as a `jax.vmap`."""
        for trace in _jax.outward(_jax.current_trace(None), self._trace):
            if _jax.trace_of(value) is trace:
                raise RuntimeError(
                    f"the Variable {variable.name!r} is assigned inside {_name(trace)} a value "
                    f"that exists only there ({_jax.type_text(value.aval)} of each). Return the "
                    "value, and assign it outside."
                )

    # ------------------------------------------------------------------------------------ program

    def explicit(self, program: Any) -> tuple[Any, list[Variable]]:
        """The program with one more input, behind the others, for each Variable whose value at the
        function's entry is used; and these, in the order of the reads."""
        variables = list(self._entry)
        if not variables:
            return program, []
        places = {id(value): i for i, of in enumerate(self._entry.values()) for value in of}
        slots = [places.get(id(constant)) for constant in _jax.constants_of(program)]
        return _jax.with_inputs(program, [v.aval for v in variables], slots), variables


def _name(trace: Any) -> str:
    return "a jax.vmap" if "Batch" in type(trace).__name__ else "a transformation"


def variable_of(value: object) -> Variable | None:
    """The Variable whose value, read in a function that is being traced, this is; else None."""
    if isinstance(value, _jax.Placeholder):
        variable: Variable | None = value.stands_for()
        return variable
    return None
