"""Text for messages: names of functions, short forms of values, lists, tables and sizes."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any

import jax
import numpy as np


def name_of(fun: object) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", None) or type(fun).__name__


def code_name(fun: object) -> str:
    """``fun`` for a function without a name, as a model."""
    name = getattr(fun, "__name__", "")
    return name if name.isidentifier() and not name.startswith("__") else "fun"


def described(fun: object) -> str:
    """With the source line if known: ``'relu' (layers.py:12)``."""
    code = code_of(fun)
    if code is None:
        return f"'{name_of(fun)}'"
    file = notebook_cell(code.co_filename) or code.co_filename
    return f"'{name_of(fun)}' ({file}:{code.co_firstlineno})"


def notebook_cell(file: str) -> str | None:
    """As ``In[3]``."""
    ipython = sys.modules.get("IPython")  # does not import IPython
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell.compile, "format_code_name"):
        named = shell.compile.format_code_name(file)
        if named is not None:
            return str(named[1])  # ("Cell", "In[3]")
    return None


def code_of(fun: Any) -> CodeType | None:
    while isinstance(fun, functools.partial):
        fun = fun.func
    fun = inspect.unwrap(fun)
    if not inspect.isroutine(fun) and not isinstance(fun, type):
        fun = inspect.unwrap(type(fun).__call__)
    return getattr(getattr(fun, "__func__", fun), "__code__", None)


def with_article(noun: str) -> str:
    """As ``an object``, ``an x``, ``a target``."""
    return f"{'an' if noun[0] in 'aeioAEIO' or noun == 'x' else 'a'} {noun}"


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def counted(count: int, noun: str) -> str:
    """As ``1 input``, ``2 inputs``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def some(names: Sequence[str], most: int) -> str:
    """Joins the first `most` names, and counts the others: ``a, b and 5 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def listed(names: Sequence[str], most: int) -> str:
    """Like `some`, with "and" before the last name: ``a, b and c``; `names` is not empty."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    *first, last = [*names[:most], *more]
    return f"{', '.join(first)} and {last}" if first else last


def nearest(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the names most similar to `patterns`, three at most; without similar names, the first
    three."""
    lowered = {name.lower(): name for name in names}
    near: dict[str, None] = {}
    for pattern in patterns:
        close = difflib.get_close_matches(pattern.lower(), lowered, 3, cutoff=0.4)
        near.update((lowered[name], None) for name in close)
    return list(near)[:3] or list(names[:3])


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows of cells as lines of text.

    >>> table([("x", "bytes"), ("kernel", "64")])
    ['x       bytes', 'kernel  64']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def brief(value: object) -> str:
    """Describes a value in a message: dtype and shape of an array, type and repr of other
    values."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"an array {value.dtype}[{','.join(map(str, value.shape))}]"
    if value is None:
        return "None"
    return f"{with_article(type(value).__name__)}: {shortened(repr(value))}"


def shortened(text: str) -> str:
    """In one line, of at most sixty characters."""
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= 60 else f"{text[:57]}..."


def changes_lost(function: str, paths: Sequence[str]) -> str:
    """Returns the message for a function that changes an `nnx.State`, at `paths`, in vain."""
    return (
        f"{function} changes {some(paths, 1)} of an nnx.State, its argument. The function gets a "
        "copy of the state, so the change is lost when the function returns. Let the function "
        "return the new state (nnx.state(model)), or pass the module itself, which keeps changes"
    )


def in_units(size: float) -> str:
    """As ``1.25 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
