"""Functions of later rooms that earlier rooms need.

Each later room registers its functions when it is imported, so that earlier rooms need not import
the later room.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph


def _import_later(file: str, what: str) -> Callable[..., Any]:
    """The import at the first call replaces this function in `engine`."""

    def first(*args: Any) -> Any:
        importlib.import_module(f"tracegrad.{file}")  # replaces this function in `engine`
        return getattr(engine, what)(*args)

    return first


@dataclass
class Engine:
    """The functions that later rooms register.

    `to_callable`: returns the function that a graph computes.
    `fit_to_budget`: returns the rule that recomputes so much that a gradient fits into a budget.
    `derivatives_by_rules`: a context in which the rules in force apply to JAX's own derivatives.
    """

    to_callable: Callable[[Graph], Callable[..., Any]]
    fit_to_budget: Callable[..., Callable[[Graph], Graph]]
    derivatives_by_rules: Callable[[], AbstractContextManager[None]]


engine = Engine(
    to_callable=_import_later("tracing.callable", "to_callable"),
    fit_to_budget=_import_later("planning.plan_recompute", "fit_to_budget"),
    derivatives_by_rules=_import_later("differentiation.jax_derivatives", "derivatives_by_rules"),
)
