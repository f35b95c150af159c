"""Variables that an annotated function reads or assigns.

A rule sees them as inputs and outputs of the function, like arguments and results: a value that
went in or out on another way would be a constant, or a tracer that outlives its trace.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tracegrad.ir.wording import described
from tracegrad.variables.capture import variable_of
from tracegrad.variables.reading import InOwnTrace, ReadsOutside
from tracegrad.variables.trees import is_variable
from tracegrad.variables.variable import Variable


class Reads(ReadsOutside):
    """Collects the Variables that a function with a custom gradient reads. (A `Listener`.)"""

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        self._fun = fun
        leaves = jax.tree.leaves(args, is_leaf=is_variable)
        self._given = {leaf for leaf in leaves if isinstance(leaf, Variable)}
        self._found: dict[Variable, None] = {}

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
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
        with _given(fun, variables, values).around():
            y, grad_fn = fun(*own, **kwargs)
        require_variables_parameter(fun, grad_fn, variables)
        return y, flat_with_variables(fun, grad_fn, variables, values, len(own))

    return as_inputs


def flat_with_variables(
    fun: Callable[..., Any],
    grad_fn: Callable[..., Any],
    variables: Sequence[Variable],
    values: Sequence[Any],
    count: int,
) -> Callable[..., Any]:
    """A gradient function that is handed no Variables, and returns their gradients after those of
    the other arguments, `count` of them. What it reads of the Variables are these values."""
    given = _given(fun, variables, values)

    @functools.wraps(grad_fn, updated=())
    def with_those_of_variables(*dys: Any) -> tuple[Any, ...]:
        with given.around():
            result = grad_fn(*dys, variables=list(variables))
        return _flat(fun, grad_fn, result, count, variables)

    return with_those_of_variables


def _given(
    fun: Callable[..., Any], variables: Sequence[Variable], values: Sequence[Any]
) -> Substitute:
    return Substitute(dict(zip(variables, values, strict=True)), fun)


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
