"""What functions call their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def parameters_of(fun: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function; of one without a signature, as some builtins are, none."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (ValueError, TypeError):
        return []


def positional(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Those of which each takes one argument that may be given by position."""
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def argument_names(fun: Callable[..., Any], count: int) -> list[str]:
    """What a function calls its first positional arguments: ``x``, ``args[0]``."""
    parameters = parameters_of(fun)
    names = [p.name for p in positional(parameters)][:count]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return [*names, *(f"{rest}[{i}]" for i in range(count - len(names)))]
