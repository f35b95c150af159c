"""What a function reads of Variables that is traced for one call, and around it has a value.

A function with a custom gradient is one: its rule has each trainable Variable that it reads as an
input, like its arguments. A value that went in on another way would be a constant, or a tracer that
outlives its trace.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir.wording import described
from tracegrad.variables import kept_programs
from tracegrad.variables.listening import Listener, listening
from tracegrad.variables.statics import is_variable
from tracegrad.variables.variable import Variable


class ReadsOutside(Listener):
    """For a function that is traced to be run once, here and now: what it reads of Variables is
    what it would read if it were not traced, a value of the trace around it.

    The function's own trace has that as an operand: no value stays in it for a later call. What is
    not a part of a function traced by `tracegrad.trace` may call functions that read Variables, but
    no nested jits or bodies of loops that do: JAX would keep the value.
    """

    def __init__(self) -> None:
        self._trace = _jax.current_trace(None)
        self._own: Any = None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Listens while the function runs: a block inside of what is traced."""
        self._own = _jax.staging_trace()
        with listening(self):
            yield

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        if kept_programs.is_traced() or _jax.staging_trace() is self._own:
            return self.own_read(variable, outside)
        return outside()

    def own_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        """What the function gets."""
        with _jax.set_current_trace(self._trace):
            return outside()


# ---------------------------------------------------- functions with a gradient of their own


class _Reading(threading.local):
    for_gradient = False  # a gradient function that is traced reads, and what it belongs to has not


_reading = _Reading()


class Reads(ReadsOutside):
    """Collects the Variables that a function with a custom gradient reads."""

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        self._fun = fun
        leaves = jax.tree.leaves(args, is_leaf=is_variable)
        self._given = {leaf for leaf in leaves if isinstance(leaf, Variable)}
        self._found: dict[Variable, None] = {}

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        value = super().on_read(variable, outside)
        if not _reading.for_gradient:
            self._found[variable] = None
        return value

    @property
    def trainable(self) -> tuple[Variable, ...]:
        """The trainable ones, each once, without those given as arguments, sorted by name."""
        return tuple(sorted(filter(self.is_input, self._found), key=lambda v: v.name))

    def is_input(self, variable: Variable) -> bool:
        """Whether a Variable that the function reads becomes an input of its rule."""
        return variable.trainable and variable not in self._given

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        _refuse_assignment(self._fun, variable)


class Operands(Reads):
    """The same for a function that is traced together with its gradient function: there each
    trainable Variable is an operand, one that stands for its value in the trace around.

    Attributes:
      listed: those of which the gradient function has to return the gradients.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(fun, args)
        self.listed: tuple[Variable, ...] = ()
        self._values: dict[Variable, Any] = {}  # around the function
        # What stands for them: the last is what readers get.
        self._operands: dict[Variable, list[Any]] = {}

    def own_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        if variable not in self._values:
            value = super().own_read(variable, outside)
            if not self.is_input(variable):
                return value
            self._values[variable] = value
            self._add_operand(variable)
        return self._operands[variable][-1]

    def on_renewal(self, variable: Variable) -> bool:
        if variable in self._values:
            self._add_operand(variable)
        return variable in self._values

    def _add_operand(self, variable: Variable) -> None:
        operand = _jax.Placeholder(variable.aval, weakref.ref(variable), lambda: None)
        self._operands.setdefault(variable, []).append(operand)

    def list_read(self) -> list[Any]:
        """Lists what was read until now. Returns an operand for each."""
        self.listed = self.trainable
        return [self._operands[variable][0] for variable in self.listed]

    @property
    def values(self) -> list[Any]:
        """Those of the Variables that are listed."""
        return [self._values[variable] for variable in self.listed]

    def place(self, value: Any) -> int | None:
        """The place of the listed Variable for which an operand stands; of other values None."""
        each = enumerate(self.listed)
        return next((i for i, v in each if any(value is x for x in self._operands[v])), None)

    def value_of(self, operand: Any) -> Any:
        """What an operand stands for; other values are themselves."""
        for variable, operands in self._operands.items():
            if any(operand is each for each in operands):
                return self._values[variable]
        return operand


class InGradient(ReadsOutside):
    """For a gradient function, traced inside of the trace of its function. What it alone reads is
    an operand too, and no input: it is not read by the function, nor by those around that, which
    only call it."""

    def own_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        before, _reading.for_gradient = _reading.for_gradient, True
        try:
            return super().own_read(variable, outside)
        finally:
            _reading.for_gradient = before


class Substitute(ReadsOutside):
    """Gives readers of some Variables the values that a rule was given for them, in one call."""

    def __init__(self, values: Mapping[Variable, Any], fun: Callable[..., Any]) -> None:
        super().__init__()
        self._values = dict(values)
        self._fun = fun

    def own_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        if variable in self._values:
            return self._values[variable]
        return super().own_read(variable, outside)

    def on_renewal(self, variable: Variable) -> bool:
        if variable not in self._values:
            return False
        self._values[variable] = _another(self._values[variable], self._own)
        return True

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        _refuse_assignment(self._fun, variable)


def _another(value: Any, trace: Any) -> Any:
    """Another object for a value, in a trace; where there is none, tapes around see that it comes
    from the one before."""
    with _jax.set_current_trace(trace or _jax.current_trace(None)):
        return jnp.array(value, copy=True)


def _refuse_assignment(fun: Callable[..., Any], variable: Variable) -> None:
    raise RuntimeError(
        f"{described(fun)}, which has a custom gradient, assigns the Variable {variable.name!r}: "
        "its rule may run it more than once, or not at all. Return the value and assign it outside"
    )
