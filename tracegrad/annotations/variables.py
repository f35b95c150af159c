"""Variables that an annotated function reads or assigns.

A rule sees them as inputs and outputs of the function, like arguments and results: a value that
went in or out on another way would be a constant, or a tracer that outlives its trace.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir.wording import described
from tracegrad.variables.capture import variable_of
from tracegrad.variables.reading import InOwnTrace, ReadsOutside
from tracegrad.variables.statics import is_variable
from tracegrad.variables.variable import Variable


class _Reading(threading.local):
    for_gradient = False  # a gradient function that is traced reads, and what it belongs to has not


_reading = _Reading()


class Reads(ReadsOutside):
    """Collects the Variables that a function with a custom gradient reads. (A `Listener`.)"""

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
    trainable Variable is an operand, one that stands for its value in the trace around. (A
    `Listener`.)

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

    def list_for(self, grad_fn: Callable[..., Any], count: int) -> tuple[Any, list[Any]]:
        """Lists what was read until now. Returns the gradient function as one of cotangents alone,
        which returns the gradients of `count` arguments and of those; and their operands."""
        self.listed = self.trainable
        operands = [self._operands[variable] for variable in self.listed]
        if operands:
            require_variables_parameter(self._fun, grad_fn, self.listed)
            grad_fn = flat_with_variables(self._fun, grad_fn, self.listed, count)
        return _heard(_InGradient(self), grad_fn), operands

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


class _InGradient(InOwnTrace):
    """What a gradient function alone reads is an operand too, and no input. (A `Listener`.)"""

    def __init__(self, operands: Operands) -> None:
        self._operands = operands

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        if self._is_inside:
            return outside()
        return self._operands.read_for_gradient(variable, outside)

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        outside(value)


class Substitute(InOwnTrace):
    """Gives readers of some Variables the values that a rule was given for them. (A `Listener`.)

    Functions further inside read outside, as ever; `custom_gradient` puts the values there.
    """

    def __init__(self, values: Mapping[Variable, Any], fun: Callable[..., Any]) -> None:
        self._values = values
        self._fun = fun

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        known = variable in self._values and not self._is_inside
        return self._values[variable] if known else outside()

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        _refuse_assignment(self._fun, variable)


class Assignments:
    """Keeps assignments until the function is done. (A `Listener`.)"""

    def __init__(self) -> None:
        self.values: dict[Variable, Any] = {}

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        return self.values[variable] if variable in self.values else outside()

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        self.values[variable] = value


def _refuse_assignment(fun: Callable[..., Any], variable: Variable) -> None:
    raise RuntimeError(
        f"{described(fun)}, which has a custom gradient, assigns the Variable {variable.name!r}: "
        "its rule may run it more than once, or not at all. Return the value and assign it outside"
    )


def require_variables_parameter(
    fun: Callable[..., Any], grad_fn: Callable[..., Any], variables: Sequence[Variable]
) -> None:
    """Raises TypeError if a gradient function has no place for the Variables that were read."""
    try:
        parameters = inspect.signature(grad_fn).parameters.values()
    except (TypeError, ValueError):
        return
    if not any(p.name == "variables" or p.kind is p.VAR_KEYWORD for p in parameters):
        names = ", ".join(repr(variable.name) for variable in variables)
        raise TypeError(
            f"{described(fun)} has a custom gradient and reads the trainable Variables {names}, so "
            f"its gradient function {described(grad_fn)} must take them, as grad_fn(*dys, "
            "variables=None), and return (gradients of the inputs, gradients of the variables). "
            "If they are meant as constants, make them trainable=False or read them outside"
        )


def with_variables(fun: Callable[..., Any], variables: Sequence[Variable]) -> Callable[..., Any]:
    """A function with a custom gradient whose last argument is the values of Variables that it
    reads, and whose gradient function returns their gradients too."""

    @functools.wraps(fun, updated=())
    def as_inputs(*args: Any, **kwargs: Any) -> tuple[Any, Callable[..., Any]]:
        *own, values = args
        y, grad_fn = given_variables(fun, fun, variables, values)(*own, **kwargs)
        require_variables_parameter(fun, grad_fn, variables)
        flat = flat_with_variables(fun, grad_fn, variables, len(own))
        return y, given_variables(fun, flat, variables, values)

    return as_inputs


def flat_with_variables(
    fun: Callable[..., Any],
    grad_fn: Callable[..., Any],
    variables: Sequence[Variable],
    count: int,
) -> Callable[..., Any]:
    """A gradient function that is handed no Variables, and returns their gradients after those of
    the other arguments, `count` of them."""

    @functools.wraps(grad_fn, updated=())
    def with_those_of_variables(*dys: Any) -> tuple[Any, ...]:
        result = grad_fn(*dys, variables=list(variables))
        return _flat(fun, grad_fn, result, count, variables)

    return with_those_of_variables


def given_variables(
    fun: Callable[..., Any],
    part: Callable[..., Any],
    variables: Sequence[Variable],
    values: Sequence[Any],
) -> Callable[..., Any]:
    """A function with a custom gradient, or the gradient function of that, for which the values of
    some Variables are these."""
    return _heard(Substitute(dict(zip(variables, values, strict=True)), fun), part)


def _heard(listener: InOwnTrace, part: Callable[..., Any]) -> Callable[..., Any]:
    """A function to whose Variables somebody listens."""

    @functools.wraps(part, updated=())
    def heard(*args: Any, **kwargs: Any) -> Any:
        with listener.around():
            return part(*args, **kwargs)

    return heard


def _flat(
    fun: Callable[..., Any],
    grad_fn: Callable[..., Any],
    result: Any,
    count: int,
    variables: Sequence[Variable],
) -> tuple[Any, ...]:
    """``(gradients, variable gradients)`` as one gradient for each argument."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(
            f"the gradient function {described(grad_fn)} of {described(fun)} was given variables, "
            "so it must return a pair (gradients of the inputs, gradients of the variables)"
        )
    gradients, of_variables = result
    of_variables = list(of_variables) if isinstance(of_variables, tuple | list) else [of_variables]
    if len(of_variables) != len(variables):
        names = ", ".join(repr(variable.name) for variable in variables)
        raise ValueError(
            f"the gradient function {described(grad_fn)} of {described(fun)} returned "
            f"{len(of_variables)} variable gradients for {len(variables)} variables ({names})"
        )
    inputs = list(gradients) if isinstance(gradients, tuple | list) else [gradients]
    return (*inputs, of_variables) if len(inputs) == count else (*inputs, *of_variables)
