"""A `Statement`: a small program that runs with TensorFlow and with tracegrad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Statement:
    """A program that makes one statement come true.

    `ours` and `because` are given where tracegrad's result is not TensorFlow's; `recorded` is
    whether TensorFlow can run it at all.
    """

    program: Callable[[Any], Any]
    ours: Any = None
    because: str = ""
    recorded: bool = True


STATEMENTS: dict[str, Statement] = {}


def states(program: Any = None, **details: Any) -> Any:
    if program is None:
        return lambda program: states(program, **details)
    assert program.__name__ not in STATEMENTS
    STATEMENTS[program.__name__] = Statement(program, **details)
    return program


# ---------------------------------------------------------------------------- parts of programs


def value_and_slope(
    lib: Any, fun: Callable[[], Any], sources: Any, watched: Any = None, **options: Any
) -> Any:
    """What a function returns, and its gradient on a tape that watches the sources, or others."""
    with lib.GradientTape() as tape:
        tape.watch(sources if watched is None else watched)
        y = fun()
    return [y, tape.gradient(y, sources, **options)]


def slope(lib: Any, fun: Callable[[], Any], sources: Any, **options: Any) -> Any:
    """The gradient alone."""
    return value_and_slope(lib, fun, sources, **options)[1]


def raised(attempt: Callable[[], Any]) -> str:
    """The class of what a call raises: the builtin one, if it is a subclass of such a one."""
    try:
        attempt()
    except Exception as error:
        builtin = next(c for c in type(error).__mro__ if c.__module__ == "builtins")
        return (type(error) if builtin is Exception else builtin).__name__
    return "nothing"


# -------------------------------------------------------------------------------------- results


def plain(result: Any) -> Any:
    """A result as JSON has it; complex numbers and slices become dicts."""
    if result is None or isinstance(result, (bool, str)):
        return result
    if isinstance(result, dict):
        return {str(key): plain(value) for key, value in result.items()}
    if hasattr(result, "indices") and hasattr(result, "dense_shape"):
        return {
            "indices": plain(result.indices),
            "values": plain(result.values),
            "dense_shape": [int(n) for n in result.dense_shape],
        }
    if isinstance(result, (list, tuple)):
        return [plain(value) for value in result]
    array = np.asarray(result)
    if array.ndim:
        return [plain(row) for row in array]
    if np.iscomplexobj(array):
        return {"real": plain(array.real), "imag": plain(array.imag)}
    return float(str(array)) if array.dtype == np.float32 else array.item()
