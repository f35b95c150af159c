"""Listeners for functions with a custom gradient: the Variables that they read, and their values.

Each trainable Variable that such a function reads is an input of its rule, like an argument.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir.wording import described
from tracegrad.variables.reading import ReadsOutside
from tracegrad.variables.trees import is_variable
from tracegrad.variables.variable import Variable


class _Reading(threading.local):
    for_gradient = False  # whether the reader is a gradient function, not its function


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
        """The trainable Variables that the function has read, without its arguments, by name."""
        return tuple(sorted(filter(self.is_input, self._found), key=lambda v: v.name))

    def is_input(self, variable: Variable) -> bool:
        """Whether a Variable becomes an input of the rule if the function reads it."""
        return variable.trainable and variable not in self._given

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        _refuse_assignment(self._fun, variable)


class Operands(Reads):
    """`Reads` for a function that is traced together with its gradient function. Each trainable
    Variable is an operand: a placeholder for the Variable's value in the trace around.

    Attributes:
      listed: the Variables whose gradients the gradient function must return.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(fun, args)
        self.listed: tuple[Variable, ...] = ()
        self._placeholders = _jax.PlaceholderTrace()  # type: ignore[no-untyped-call]
        self._values: dict[Variable, Any] = {}  # in the trace around the function
        # The placeholders of each Variable; readers get the last one.
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
        operand = _jax.Placeholder(self._placeholders, variable.aval, weakref.ref(variable))
        self._operands.setdefault(variable, []).append(operand)

    def list_read(self) -> list[Any]:
        """Sets `listed` to the Variables read so far; returns an operand for each."""
        self.listed = self.trainable
        return [self._operands[variable][0] for variable in self.listed]

    @property
    def values(self) -> list[Any]:
        """The values of the listed Variables."""
        return [self._values[variable] for variable in self.listed]

    def place(self, value: Any) -> int | None:
        """The index in `listed` of the Variable of an operand; None for other values."""
        each = enumerate(self.listed)
        return next((i for i, v in each if any(value is x for x in self._operands[v])), None)

    def value_of(self, operand: Any) -> Any:
        """The value that an operand stands for; other values are returned unchanged."""
        for variable, operands in self._operands.items():
            if any(operand is each for each in operands):
                return self._values[variable]
        return operand


class InGradient(ReadsOutside):
    """Listens while a gradient function is traced, inside the trace of its function. A Variable
    that only the gradient function reads is an operand, but not an input of the rule: the function
    and the functions around it have not read the Variable."""

    def own_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        before, _reading.for_gradient = _reading.for_gradient, True
        try:
            return super().own_read(variable, outside)
        finally:
            _reading.for_gradient = before


class Substitute(ReadsOutside):
    """For one call, gives readers of some Variables the values that a rule got for them."""

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
        self._values[variable] = _copy_in_trace(self._values[variable], self._own)
        return True

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        _refuse_assignment(self._fun, variable)


def _copy_in_trace(value: Any, trace: Any) -> Any:
    """Returns a new object with the same value, made in `trace`; None: in the current trace, so
    that tapes record the copy."""
    with _jax.set_current_trace(trace or _jax.current_trace(None)):
        return jnp.array(value, copy=True)


def _refuse_assignment(fun: Callable[..., Any], variable: Variable) -> None:
    raise RuntimeError(
        f"{described(fun)}, which has a custom gradient, assigns the Variable {variable.name!r}: "
        "the rule may run the function more than once, or not at all. Return the value and assign "
        "it outside"
    )
