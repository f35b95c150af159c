"""Derivatives that many tests ask for in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tracegrad as tg


def value_by_tape(fun: Callable[..., Any], *args: Any, sources: Any = None) -> tuple[Any, Any]:
    """What a function returns, and its gradient on a tape: for its argument, for each of several,
    or for other `sources`, which are Variables."""
    with tg.GradientTape() as tape:
        tape.watch(args)
        value = fun(*args)
    if sources is None:
        sources = args if len(args) > 1 else args[0]
    return value, tape.gradient(value, sources)


def by_tape(fun: Callable[..., Any], *args: Any, sources: Any = None) -> Any:
    """The gradient alone."""
    return value_by_tape(fun, *args, sources=sources)[1]
