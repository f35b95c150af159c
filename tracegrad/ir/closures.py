"""Finds the values that a Python function uses without having them as arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import jax
import numpy as np

from tracegrad import _jax

# The most objects to search, and the types of objects that contain no tracers.
_MOST = 10_000
_WITHOUT = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type, ModuleType),
    *(BuiltinFunctionType, np.ndarray, np.generic, np.dtype, jax.Array),
)


def may_hold_tracers(function: Any) -> bool:
    """Whether a function closes over tracers, or over objects that cannot be searched for
    tracers."""
    pending, seen = [function], set[int]()
    while pending:
        held = pending.pop()
        if isinstance(held, jax.core.Tracer) or len(seen) > _MOST:
            return True
        if id(held) in seen or isinstance(held, _WITHOUT):
            continue
        seen.add(id(held))
        if isinstance(held, functools.partial):
            pending += [held.func, *held.args, *held.keywords.values()]
        elif isinstance(held, FunctionType):
            pending += [_jax.cell_content(cell) for cell in held.__closure__ or ()]
            pending += [*(held.__defaults__ or ()), *(held.__kwdefaults__ or {}).values()]
        elif isinstance(held, MethodType):
            pending += [held.__func__, held.__self__]
        elif isinstance(held, tuple | list | set | frozenset):
            pending += held
        elif isinstance(held, dict):
            pending += held.values()
        elif hasattr(held, "__dict__"):
            pending += [*vars(held).values(), getattr(held, "__wrapped__", None)]
        else:
            return True
    return False


def values_closed_over(fun: object, depth: int) -> Iterator[tuple[str, object]]:
    """Yields the names and values that a function closes over, reads as globals, or is bound to.
    The search goes into functions among these values, `depth` levels deep."""
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
