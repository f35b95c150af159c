"""How messages speak of the user's functions and values."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Collection, Sequence
from types import CodeType
from typing import Any

import jax
import numpy as np


def name_of(fun: object) -> str:
    """The name by which messages and programs know a function."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", None) or type(fun).__name__


def described(fun: object) -> str:
    """A function by name and by the place where it was written: ``'relu' (layers.py:12)``."""
    code = code_of(fun)
    if code is None:
        return f"'{name_of(fun)}'"
    file = notebook_cell(code.co_filename) or code.co_filename
    return f"'{name_of(fun)}' ({file}:{code.co_firstlineno})"


def notebook_cell(file: str) -> str | None:
    """Of the file in which IPython keeps a cell the name that it has for people: ``In[3]``."""
    ipython = sys.modules.get("IPython")  # nothing is imported for it
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell.compile, "format_code_name"):
        named = shell.compile.format_code_name(file)
        if named is not None:
            return str(named[1])  # ("Cell", "In[3]")
    return None


def code_of(fun: Any) -> CodeType | None:
    """What was written for a function, a method, a partial or an object that can be called."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    fun = inspect.unwrap(fun)
    if not inspect.isroutine(fun) and not isinstance(fun, type):
        fun = inspect.unwrap(type(fun).__call__)
    return getattr(getattr(fun, "__func__", fun), "__code__", None)


def with_article(noun: str) -> str:
    """A noun with its article: ``an object``, ``an x``, ``a target``."""
    return f"{'an' if noun[0] in 'aeioAEIO' or noun == 'x' else 'a'} {noun}"


def first_line(error: Exception) -> str:
    """What an error says, in one line; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def counted(count: int, noun: str) -> str:
    """A number of things: ``1 input``, ``2 inputs``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def some(names: Sequence[str], most: int) -> str:
    """So many names at most: ``a, b and 5 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def listed(names: Sequence[str], most: int) -> str:
    """The same as a part of a sentence: ``a, b and c``, ``a, b and 5 more``."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    *first, last = [*names[:most], *more]
    return f"{', '.join(first)} and {last}" if first else last


def nearest(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that are most like what was asked for, three at most; the first ones if none is."""
    lowered = {name.lower(): name for name in names}
    near: dict[str, None] = {}
    for pattern in patterns:
        close = difflib.get_close_matches(pattern.lower(), lowered, 3, cutoff=0.4)
        near.update((lowered[name], None) for name in close)
    return list(near)[:3] or list(names[:3])


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows of cells in columns, two spaces apart; those at the positions `right` end alike.

    >>> table([("x", "bytes"), ("kernel", "64")], right=[1])
    ['x       bytes', 'kernel     64']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def brief(value: object) -> str:
    """A value for a message: its type, and its shape if it is an array."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"an array {value.dtype}[{','.join(map(str, value.shape))}]"
    if value is None:
        return "None"
    return f"{with_article(type(value).__name__)}: {shortened(repr(value))}"


def shortened(text: str) -> str:
    """The text in one line, or its beginning, where it is longer than sixty characters."""
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= 60 else f"{text[:57]}..."


def changes_lost(function: str, paths: Sequence[str]) -> str:
    """Of a call of a function that changes what is at these paths in modules that it is given."""
    return (
        f"{function} changes {some(paths, 1)}, of an nnx.State that it is given. It has a copy of "
        "the state, so that what it assigns is lost when the call is over. Have it return "
        "the new state (nnx.state(model)), or give it the module itself, which is then changed"
    )


def in_units(size: float) -> str:
    """Bytes for a reader: ``1.25 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
