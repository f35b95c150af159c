"""A `Statement`: a small program that runs with TensorFlow and with tracegrad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Statement:
    """A program that makes one statement come true.

    `needs` are the names that its namespace must have. `ours` and `because` are given where
    tracegrad's result is not TensorFlow's; `recorded` is whether TensorFlow can run it at all.
    """

    section: str
    program: Callable[[Any], Any]
    needs: tuple[str, ...] = ()
    ours: Any = None
    because: str = ""
    recorded: bool = True


STATEMENTS: dict[str, Statement] = {}
_section = ""


def section(title: str) -> None:
    global _section
    _section = title


def states(program: Any = None, **details: Any) -> Any:
    if program is None:
        return lambda program: states(program, **details)
    assert program.__name__ not in STATEMENTS
    STATEMENTS[program.__name__] = Statement(_section, program, **details)
    return program


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


def raised(attempt: Callable[[], Any]) -> str:
    """The class of what a call raises: the builtin one, if it is a subclass of such a one."""
    try:
        attempt()
    except Exception as error:
        builtin = next(c for c in type(error).__mro__ if c.__module__ == "builtins")
        return (type(error) if builtin is Exception else builtin).__name__
    return "nothing"
