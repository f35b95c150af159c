"""The names of parameters and arguments, and the names by which pickle finds functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracegrad.ir.wording import described
from tracegrad.tracing.leaves import Leaf, leaves_of


def parameters_of(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    """[] for a function without a signature, like some builtins."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (ValueError, TypeError):
        return []


def positional(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """The parameters that take one argument by position."""
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def varies_in_count(fun: Callable[..., Any]) -> bool:
    """Whether calls may differ in the number of their positional arguments."""
    parameters = parameters_of(fun)
    if not parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    return any(p.default is not p.empty for p in positional(parameters))


def argument_names(fun: Callable[..., Any], count: int) -> list[str]:
    """Of the first `count` positional arguments: ``x``, ``args.0``."""
    parameters = parameters_of(fun)
    names = [p.name for p in positional(parameters)][:count]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return [*names, *(f"{rest}.{i}" for i in range(count - len(names)))]


def leaves_of_call(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Leaf]:
    """In JAX's order of flattening. The name of a leaf begins with the name of its argument,
    ``params.0.kernel``, as in messages, ``wrt`` and `match.param`."""
    named = zip(argument_names(fun, len(args)), args, strict=True)
    arguments = (*named, *sorted(kwargs.items()))
    return [leaf.within(name) for name, tree in arguments for leaf in leaves_of(tree)]


def name_in_module(fun: Any) -> str | None:
    """The name by which another process finds the function in its module, if it can; else None."""
    name: str = getattr(fun, "__qualname__", "")
    found: Any = sys.modules.get(fun.__module__)
    for part in name.split("."):
        found = getattr(found, part, None)
    # In another process, ``__main__`` is another module.
    return name if found is fun and fun.__module__ != "__main__" else None


def require_takes(fun: Any, count: int, expected: str) -> None:
    """Raises TypeError if `fun` cannot be called with `count` positional arguments."""
    if not callable(fun):
        raise TypeError(f"expected a {expected}, got {fun!r}")
    parameters = parameters_of(fun)
    has_rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if parameters and not has_rest and len(positional(parameters)) < count:
        raise TypeError(f"expected a {expected}; {described(fun)} takes {inspect.signature(fun)}")
