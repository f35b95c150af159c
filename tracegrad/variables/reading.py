"""What a function reads of Variables that is traced for one call, and around it has a value.

A function with a custom gradient is one: its rule has each trainable Variable that it reads as an
input, like its arguments. A value that went in on another way would be a constant, or a tracer that
outlives its trace.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir.wording import described
from tracegrad.variables.capture import apart, is_telling, variable_of
from tracegrad.variables.listening import Listener, listening
from tracegrad.variables.statics import is_variable
from tracegrad.variables.variable import Variable


class InOwnTrace(Listener):
    """Listens to a function in the trace of its own program, which is a new one for every call.

    The programs of functions further inside (the bodies of loops, nested jits) are kept by JAX, and
    not traced again: a value from around the function must not get into them.
    """

    def __init__(self) -> None:
        self._own: Any = None
        self._apart: set[Variable] = set()  # of which each read is a value of its own

    @contextmanager
    def around(self) -> Iterator[None]:
        """Listens while the function runs: a block inside of what is traced."""
        self._own = _jax.staging_trace()
        with listening(self):
            yield

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        if self._is_inside:
            return outside()
        value = self.own_read(variable, outside)
        if is_telling():
            return outside()  # by which a function was called that JAX has kept
        return apart(value, self._own) if variable in self._apart else value

    def own_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        """What the function itself reads."""
        return outside()

    def on_renewal(self, variable: Variable) -> bool:
        if self._own is not None and _jax.has_gradient(variable):
            self._apart.add(variable)
        return False  # the value comes from outside

    @property
    def _is_inside(self) -> bool:
        """Whether a function further inside is being traced now."""
        return _jax.staging_trace() is not self._own


class ReadsOutside(InOwnTrace):
    """For a function that is traced to be run once, here and now: what it reads of Variables is
    what it would read if it were not traced, a value of the trace around it.

    The function's own trace has that as an operand: no value stays in it for a later call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trace = _jax.current_trace(None)

    def own_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        with _jax.set_current_trace(self._trace):
            value = outside()
        return self.operand(variable, value)

    def operand(self, variable: Variable, value: Any) -> Any:
        """What the function gets for the value of a Variable around it."""
        return value


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
        if not _reading.for_gradient:
            self._found[variable] = None
        return super().on_read(variable, outside)

    def note(self, values: Sequence[Any]) -> None:
        """Hears of what functions further inside have read, from what the program closes over."""
        read = map(variable_of, values)
        self._found.update(dict.fromkeys(v for v in read if v is not None))

    @property
    def trainable(self) -> tuple[Variable, ...]:
        """The trainable ones, each once, without those given as arguments, sorted by name."""
        found = (v for v in self._found if v.trainable and v not in self._given)
        return tuple(sorted(found, key=lambda variable: variable.name))

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
        self._operands: dict[Variable, Any] = {}
        self._values: dict[int, Any] = {}  # by the identity of the operand

    def operand(self, variable: Variable, value: Any) -> Any:
        """What stands for the value of a Variable."""
        if not variable.trainable or variable in self._given:
            return value
        if variable not in self._operands:
            operand = _jax.Placeholder(variable.aval, weakref.ref(variable), lambda: None)
            self._operands[variable] = operand
            self._values[id(operand)] = value
        return self._operands[variable]

    def value_of(self, operand: Any) -> Any:
        """What an operand stands for; other values are themselves."""
        return self._values.get(id(operand), operand)

    def values(self) -> list[Any]:
        """Those of the Variables that are listed."""
        return [self.value_of(self._operands[variable]) for variable in self.listed]

    def list_read(self) -> list[Any]:
        """Lists what was read until now. Returns the operands that stand for that."""
        self.listed = self.trainable
        for variable in self.listed:
            if variable not in self._operands:  # just functions further inside have read it
                variable.read_value()
        return [self._operands[variable] for variable in self.listed]

    def are_all_in(self, program: Any) -> bool:
        """Whether the program has an operand for all that the function read: what functions
        further inside read that JAX has kept is not heard; and there may be no program."""
        if program is None:
            return not self.trainable
        self.note([c for c in _jax.constants_of(program) if id(c) not in self._values])
        return list(map(id, self.trainable)) == list(map(id, self.listed))

    def read_for_gradient(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        """What a read of the gradient function alone gives: by the function itself it is none, nor
        by those around it, which only call that."""
        if variable in self._operands:
            return self._operands[variable]
        before, _reading.for_gradient = _reading.for_gradient, True
        try:
            with _jax.set_current_trace(self._trace):
                value = outside()
        finally:
            _reading.for_gradient = before
        return self.operand(variable, value)


class InGradient(InOwnTrace):
    """What a gradient function alone reads is an operand too, and no input."""

    def __init__(self, operands: Operands) -> None:
        super().__init__()
        self._operands = operands

    def own_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        return self._operands.read_for_gradient(variable, outside)


class Substitute(InOwnTrace):
    """Gives readers of some Variables the values that a rule was given for them, in one call.

    Functions further inside read outside, as ever; `custom_gradient` puts the values there.
    """

    def __init__(self, values: Mapping[Variable, Any], fun: Callable[..., Any]) -> None:
        super().__init__()
        self._values = dict(values)
        self._fun = fun

    def own_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        return self._values[variable] if variable in self._values else outside()

    def on_renewal(self, variable: Variable) -> bool:
        if self._own is not None or variable not in self._values:
            return super().on_renewal(variable)
        # It runs on values. Tapes around see that the new one comes from the one before.
        self._values[variable] = jnp.array(self._values[variable], copy=True)
        return True

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        _refuse_assignment(self._fun, variable)


def _refuse_assignment(fun: Callable[..., Any], variable: Variable) -> None:
    raise RuntimeError(
        f"{described(fun)}, which has a custom gradient, assigns the Variable {variable.name!r}: "
        "its rule may run it more than once, or not at all. Return the value and assign it outside"
    )
