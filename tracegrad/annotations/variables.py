"""Passes the Variables that a function reads to its custom gradient function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tracegrad import _jax
from tracegrad.annotations.variable_reads import InGradient, Operands, Substitute
from tracegrad.ir.wording import described
from tracegrad.variables.capture import READ
from tracegrad.variables.listening import Listener, listening
from tracegrad.variables.reading import ReadsOutside
from tracegrad.variables.variable import Variable

R = TypeVar("R")


class Assignments(Listener):
    """Stores assigned values instead of assigning them; later reads return the stored values. So
    the values can leave a trace as further results."""

    def __init__(self) -> None:
        self._values: dict[Variable, Any] = {}
        self._variables: list[Variable] = []

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        if variable not in self._values:
            return outside()
        value, name = self._values[variable], variable.name if variable.trainable else ""
        if not _jax.has_gradient(value):
            return value
        return READ.bind(value, outside(), name=name, assigned_at=None)

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        self._values[variable] = value

    def run(self, call: Callable[[], R]) -> tuple[R, list[Any]]:
        """Returns the result of `call`, and the values that it assigns."""
        self._values = {}
        with listening(self):
            result = call()
        values, self._values = self._values, {}
        self._variables = list(values)
        return result, list(values.values())

    def assign(self, values: Sequence[Any]) -> None:
        """Assigns the values of the last `run`, as they are outside of the trace."""
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)


def require_variables_parameter(
    fun: Callable[..., Any], grad_fn: Callable[..., Any], variables: Sequence[Variable]
) -> None:
    try:
        parameters = inspect.signature(grad_fn).parameters.values()
    except (TypeError, ValueError):
        return
    if not any(p.name == "variables" or p.kind is p.VAR_KEYWORD for p in parameters):
        names = ", ".join(repr(variable.name) for variable in variables)
        raise TypeError(
            f"{described(fun)} has a custom gradient and reads the trainable Variables {names}. "
            f"Its gradient function {described(grad_fn)} must have a parameter `variables`, as in "
            "grad_fn(*dys, variables=None), and must return a pair (gradients of the inputs, "
            "gradients of the variables). If these Variables are constants, create them with "
            "trainable=False or read them outside the function"
        )


def list_variables(
    reads: Operands, fun: Callable[..., Any], grad_fn: Callable[..., Any], count: int
) -> tuple[Callable[..., Any], list[Any]]:
    """Lists the trainable Variables that `fun` has read so far. Returns a gradient function of
    cotangents alone, and an operand for each Variable.

    With Variables, the gradient function returns the gradients of the `count` arguments of `fun`,
    then a list of the gradients of the Variables.
    """
    operands = reads.list_read()
    if operands:
        require_variables_parameter(fun, grad_fn, reads.listed)
        grad_fn = flatten_with_variables(fun, grad_fn, reads.listed, count)
    in_gradient = InGradient()
    return _under_listener(lambda: in_gradient, grad_fn), operands


def flatten_with_variables(
    fun: Callable[..., Any],
    grad_fn: Callable[..., Any],
    variables: Sequence[Variable],
    count: int,
) -> Callable[..., Any]:
    """Wraps `grad_fn` to take only cotangents. The wrapper passes `variables` to `grad_fn`, and
    returns the gradients of the `count` inputs, then a list of the gradients of `variables`."""

    @functools.wraps(grad_fn, updated=())
    def wrapped(*dys: Any) -> tuple[Any, ...]:
        result = grad_fn(*dys, variables=list(variables))
        return _flatten_gradients(fun, grad_fn, result, count, variables)

    return wrapped


def substitute_variables(
    fun: Callable[..., Any],
    part: Callable[..., Any],
    variables: Sequence[Variable],
    values: Sequence[Any],
) -> Callable[..., Any]:
    """Wraps `part` (`fun` or its gradient function) to read `values` from `variables`."""
    substitutes = dict(zip(variables, values, strict=True))
    return _under_listener(lambda: Substitute(substitutes, fun), part)


def _under_listener(
    listener: Callable[[], ReadsOutside], part: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps `part` to run each call under a new listener."""

    @functools.wraps(part, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with listener().around():
            return part(*args, **kwargs)

    return wrapped


def _flatten_gradients(
    fun: Callable[..., Any],
    grad_fn: Callable[..., Any],
    result: Any,
    count: int,
    variables: Sequence[Variable],
) -> tuple[Any, ...]:
    """Checks and flattens ``(gradients, variable gradients)``, the `result` of `grad_fn`: the
    gradients of the inputs, then one list of the gradients of the variables."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(
            f"the gradient function {described(grad_fn)} of {described(fun)} was given variables, "
            "so it must return a pair (gradients of the inputs, gradients of the variables)"
        )
    gradients, for_variables = result
    is_sequence = isinstance(for_variables, tuple | list)
    for_variables = list(for_variables) if is_sequence else [for_variables]
    if len(for_variables) != len(variables):
        names = ", ".join(repr(variable.name) for variable in variables)
        raise ValueError(
            f"the gradient function {described(grad_fn)} of {described(fun)} returned "
            f"{len(for_variables)} variable gradients for {len(variables)} variables ({names})"
        )
    inputs = list(gradients) if isinstance(gradients, tuple | list) else [gradients]
    # If `count` differs, the caller matches the gradients to leaves, or raises the error.
    return (*inputs, for_variables) if len(inputs) == count else (*inputs, *for_variables)
