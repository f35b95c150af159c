"""Variables that an annotated function reads or assigns, as its gradient function has them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tracegrad.ir.wording import described
from tracegrad.variables.listening import Listener
from tracegrad.variables.reading import InGradient, Operands, ReadsOutside, Substitute
from tracegrad.variables.variable import Variable


class Assignments(Listener):
    """Keeps assignments until the function is done."""

    def __init__(self) -> None:
        self.values: dict[Variable, Any] = {}

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        return self.values[variable] if variable in self.values else outside()

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        self.values[variable] = value


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


def listed_with(
    reads: Operands, fun: Callable[..., Any], grad_fn: Callable[..., Any], count: int
) -> tuple[Callable[..., Any], list[Any]]:
    """Lists what a function was heard to read until now. Returns the gradient function as one of
    cotangents alone, which returns the gradients of `count` arguments and of those; and their
    operands."""
    operands = reads.list_read()
    if operands:
        require_variables_parameter(fun, grad_fn, reads.listed)
        grad_fn = flat_with_variables(fun, grad_fn, reads.listed, count)
    in_gradient = InGradient()
    return _heard(lambda: in_gradient, grad_fn), operands


def with_variables_as_inputs(
    fun: Callable[..., Any], variables: Sequence[Variable]
) -> Callable[..., Any]:
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
    given = dict(zip(variables, values, strict=True))
    return _heard(lambda: Substitute(given, fun), part)


def _heard(listener: Callable[[], ReadsOutside], part: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a new listener for its Variables in each call."""

    @functools.wraps(part, updated=())
    def heard(*args: Any, **kwargs: Any) -> Any:
        with listener().around():
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
