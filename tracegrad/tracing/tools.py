"""`tool`: the way to call a tool that looks at a function: ``tool(fun, *args, **options)``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tracegrad.ir.wording import code_name, described, name_of
from tracegrad.tracing.module_functions import function_taking_module
from tracegrad.tracing.signatures import parameters_of, positional

P = ParamSpec("P")
R = TypeVar("R")


def tool(look: Callable[P, R]) -> Callable[P, R]:
    """Makes a function a tool: its keyword-only parameters are options, and all other keywords of
    a call are arguments of the function that the tool looks at. If the function is a module and the
    tool has no option `wrt`, the module is the first of its arguments, as in `trace`: the module
    keeps what the call changes.

    Raises, when the tool is called:
      TypeError: the function has a parameter with the name of an option, and no positional argument
        fills that parameter.
    """
    parameters = inspect.signature(look).parameters.values()
    options = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}

    @functools.wraps(look)
    def looking(*args: P.args, **kwargs: P.kwargs) -> R:
        if args and callable(args[0]):
            if given := options & kwargs.keys():
                _refuse_shared(name_of(look), args, given)
            if "wrt" not in options:
                fun, module = function_taking_module(args[0])
                args = (fun, *module, *args[1:])  # type: ignore[assignment]
        return look(*args, **kwargs)

    return looking


def _refuse_shared(name: str, args: tuple[Any, ...], given: set[str]) -> None:
    """Raises TypeError for an option that could also be an argument of the function."""
    fun, *rest = args
    parameters = parameters_of(fun)
    by_position = {p.name for p in positional(parameters)[: len(rest)]}
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    bound = fun.keywords.keys() if isinstance(fun, functools.partial) else set()
    for option in given & by_name - by_position - bound:
        raise TypeError(
            f"{option} is an option of {name} and a parameter of {described(fun)}, and it is not "
            f"clear which is meant. Bind the function's own first: tracegrad.{name}("
            f"functools.partial({code_name(fun)}, {option}=...), ...), or a lambda"
        )
