"""`jax.stages.Lowered` and `Compiled` objects that are called with the user's arguments.

The program of a function with modules, Variables or static leaves takes packed arguments, and the
values of its Variables. Its compiled form is called like the traced function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Stage = TypeVar("Stage")
# Runs a compiled program for the user's (args, kwargs).
RunCompiled = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Compiled(jax.stages.Compiled):
    run: RunCompiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(super().__call__, args, kwargs)


class _Lowered(jax.stages.Lowered):
    run: RunCompiled

    def compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        compiled = _copy_as(_Compiled, super().compile(*args, **kwargs))
        compiled.run = self.run
        return compiled


def call_by(run: RunCompiled, lowered: jax.stages.Lowered) -> jax.stages.Lowered:
    """Returns a copy of `lowered` whose compiled form calls `run`."""
    stage = _copy_as(_Lowered, lowered)
    stage.run = run
    return stage


def _copy_as(kind: type[Stage], stage: Any) -> Stage:
    """Copies a stage to an object of another class."""
    new = object.__new__(kind)
    for name in (*type(stage).__slots__, *vars(stage)):
        setattr(new, name, getattr(stage, name))
    return new
