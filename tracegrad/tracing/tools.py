"""`tool`: the way to call a tool that looks at a function: ``tool(fun, *args, **options)``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from tracegrad.ir.selector import Selector
from tracegrad.ir.wording import code_name, described, listed, name_of
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
      TypeError: the function needs arguments and got none; an option without a default is missing;
        or the function has a parameter with the name of an option, and no positional argument
        fills that parameter.
    """
    parameters = inspect.signature(look).parameters.values()
    options = {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}
    needed = {name for name, is_needed in options.items() if is_needed}

    @functools.wraps(look)
    def looking(*args: P.args, **kwargs: P.kwargs) -> R:
        given = {name: value for name, value in kwargs.items() if name in options}
        if args and callable(args[0]):
            has_arguments = len(args) > 1 or len(kwargs) > len(given)
            if needed - given.keys() or not has_arguments:
                _require_all(name_of(look), args, kwargs, given, needed)
            if given:
                _refuse_shared(name_of(look), args, given)
            if "wrt" not in options:
                fun, module = function_taking_module(args[0])
                args = (fun, *module, *args[1:])  # type: ignore[assignment]
        return look(*args, **kwargs)

    return looking


def _require_all(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    given: Mapping[str, Any],
    needed: Collection[str],
) -> None:
    """Raises TypeError, which shows the right call, if an option without a default is missing, or
    if the function needs arguments and got none."""
    fun, *rest = args
    written = {option: repr(value) for option, value in given.items()}
    for option in needed - given.keys():
        # The user may have passed the option as the last positional argument.
        is_option = bool(rest) and isinstance(rest[-1], Selector | str)
        written[option] = repr(rest[-1]) if is_option else "..."
    words = [p.name if p in positional(_required(fun)) else f"{p.name}=..." for p in _required(fun)]
    options = [f"{option}={text}" for option, text in written.items()]
    call = ", ".join([code_name(fun), *words, *options])
    if missing := needed - given.keys():
        raise TypeError(
            f"{name} needs {listed(sorted(missing), 2)}, as a keyword beside the function's own "
            f"arguments: write tracegrad.{name}({call})"
        )
    if words:
        raise TypeError(
            f"{name} looks at {described(fun)} for arguments, and got none: write "
            f"tracegrad.{name}({call})"
        )


def _refuse_shared(name: str, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Raises TypeError for an option that could also be an argument of the function."""
    fun, *rest = args
    parameters = parameters_of(fun)
    by_position = {p.name for p in positional(parameters)[: len(rest)]}
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    bound = fun.keywords.keys() if isinstance(fun, functools.partial) else set()
    for option in given.keys() & by_name - by_position - bound:
        raise TypeError(
            f"{option} is an option of {name} and a parameter of {described(fun)}, and it is not "
            f"clear which is meant. Bind the function's own first: tracegrad.{name}("
            f"functools.partial({code_name(fun)}, {option}=...), ...), or a lambda"
        )


def _required(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p for p in parameters_of(fun) if p.default is p.empty and p.kind not in variadic]


def refuse_positional(name: str, fun: object, option: str, more: Sequence[Any]) -> None:
    """Raises TypeError, which shows the right call, if a decorator with options by keyword was
    given more than a function by position."""
    if more:
        raise TypeError(
            f"{name} takes a function, and options by keyword: write tracegrad.{name}("
            f"{code_name(fun)}, {option}=...), or, to call the result, tracegrad.{name}("
            f"{code_name(fun)})(...)"
        )
