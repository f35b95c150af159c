"""What a function with a custom gradient uses without having it as a positional argument.

Values of an enclosing trace that it closes over, or is given by keyword. They have no gradient, so
one that is being differentiated is an error, which calls it what the user calls it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax

from tracegrad import _jax
from tracegrad.ir.closed_over import depends_on
from tracegrad.ir.importer import import_program
from tracegrad.variables.capture import variable_of
from tracegrad.variables.statics import is_variable


@dataclass(frozen=True)
class Captured:
    """A value of an enclosing trace that a function with a custom gradient closes over."""

    position: int  # among the inputs of the rule
    name: str | None
    function: str
    primal: Callable[..., Any]  # from the inputs to the output

    def message(self, inputs: Sequence[Any]) -> str:
        what = value_text(self.name, inputs[self.position])
        return (
            f"{self.function}, which has a custom gradient, depends on {what}, which is being "
            "differentiated and is not one of its positional arguments: the gradient function "
            "cannot return a gradient for it, so it would silently be zero. Make it a positional "
            "argument and return its gradient as well or, if it is meant as a constant, use "
            "stop_gradient of it."
        )


def unwrapped(
    captured: Sequence[Captured], inputs: Sequence[Any]
) -> tuple[tuple[Any, ...], str | None]:
    """The inputs of a rule, and what is wrong with them: a captured one is being differentiated."""
    if not captured:
        return tuple(inputs), None
    values = tuple(each.value for each in inputs)
    avals = tuple(map(jax.typeof, values))
    for each in captured:
        if inputs[each.position].perturbed:
            primal = import_program(jax.make_jaxpr(each.primal)(*avals))
            if depends_on(primal, each.position):
                return values, each.message(values)
    return values, None


# ------------------------------------------------------------------------------------- naming


def value_text(name: str | None, value: Any) -> str:
    """What a message calls a value of this name, or of none: its name and its type."""
    kind = _jax.type_text(jax.typeof(value))
    return f"a value ({kind})" if name is None else f"{name} ({kind})"


def captured_name(value: object, fun: Callable[..., Any], kwargs: Mapping[str, Any]) -> str | None:
    """What the user calls a value that ``fun`` was not given as a positional argument.

    Looked for among the keyword arguments, the variables that the function closes over, the
    attributes of the object that a method belongs to, and the same of functions held by those.
    """
    if (variable := variable_of(value)) is not None:
        return f"the Variable {variable.name!r}"
    for name, held in kwargs.items():
        if (path := _path_to(value, held)) is not None:
            return f"keyword argument '{name}{path}'"
    for name, held in _closed_over(fun, depth=2):
        if (path := _path_to(value, held)) is not None:
            return f"'{name}{path}'"
    return None


def _path_to(value: object, held: object) -> str | None:
    """The path of a leaf in a tree, by identity."""
    # Variables are not looked into: that would be to read them.
    for path, leaf in jax.tree_util.tree_flatten_with_path(held, is_leaf=is_variable)[0]:
        if leaf is value:
            return str(jax.tree_util.keystr(path))
    return None


def _closed_over(fun: object, depth: int) -> Iterator[tuple[str, object]]:
    """The variables that a function closes over, reads as globals, or has as defaults."""
    fun = inspect.unwrap(cast("Any", fun))
    if depth == 0:
        return
    if isinstance(fun, functools.partial):
        yield from fun.keywords.items()
        yield from ((f"argument {i} of the partial", held) for i, held in enumerate(fun.args))
        yield from _closed_over(fun.func, depth)
        return
    if (owner := getattr(fun, "__self__", None)) is not None:
        yield from ((f"self.{name}", held) for name, held in getattr(owner, "__dict__", {}).items())
        fun = getattr(fun, "__func__", fun)
    if not inspect.isfunction(fun):
        return
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or ())
    variables = [(name, _jax.cell_content(cell)) for name, cell in cells]
    variables += [(n, fun.__globals__[n]) for n in fun.__code__.co_names if n in fun.__globals__]
    yield from variables
    for name, held in variables:
        if callable(held):
            yield from _closed_over(held, depth - 1)
        elif hasattr(held, "__dict__") and not inspect.ismodule(held):
            yield from ((f"{name}.{key}", part) for key, part in vars(held).items())
