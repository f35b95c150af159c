"""Which values a Python function uses without having them as arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax

from tracegrad import _jax


def closes_over_tracers(fun: Callable[..., Any]) -> bool:
    """Whether a function uses values of an enclosing trace, by itself or in lists and dicts."""
    return any(
        _jax.is_tracer(leaf)
        for _, held in values_closed_over(fun, depth=3)
        for leaf in jax.tree.leaves(held, is_leaf=_is_no_container)
    )


def _is_no_container(value: object) -> bool:  # a module or a Variable is not looked into
    return not isinstance(value, list | tuple | dict)


def values_closed_over(fun: object, depth: int) -> Iterator[tuple[str, object]]:
    """The variables that a function closes over, reads as globals, or has as defaults."""
    fun = inspect.unwrap(cast("Any", fun))
    if depth == 0:
        return
    if isinstance(fun, functools.partial):
        yield from fun.keywords.items()
        yield from ((f"argument {i} of the partial", held) for i, held in enumerate(fun.args))
        yield from values_closed_over(fun.func, depth)
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
            yield from values_closed_over(held, depth - 1)
        elif hasattr(held, "__dict__") and not inspect.ismodule(held):
            yield from ((f"{name}.{key}", part) for key, part in vars(held).items())
