"""What lower rooms need of those above them: to call, plan and explain a graph.

Each room gives its own when it is imported, so that the lower ones need not know it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph


def _later(file: str, what: str) -> Callable[..., Any]:
    """What a file gives that nobody has imported yet: it is imported at the first call."""

    def first(*args: Any) -> Any:
        importlib.import_module(f"tracegrad.{file}")  # and puts its own in the place of this
        return getattr(engine, what)(*args)

    return first


@dataclass
class Engine:
    """`to_callable`: the function that a graph computes.
    `fit_to_budget`: the rule that makes a graph recompute what it must to stay within a budget.
    `derivatives_by_rules`: a block in which JAX's own derivatives go by the rules in force.
    `explain_tape`: why the gradients of a tape are what they are."""

    to_callable: Callable[[Graph], Callable[..., Any]]
    fit_to_budget: Callable[..., Callable[[Graph], Graph]]
    derivatives_by_rules: Callable[[], AbstractContextManager[None]]
    explain_tape: Callable[..., Any]


engine = Engine(
    to_callable=_later("tracing.callable", "to_callable"),
    fit_to_budget=_later("planning.plan_recompute", "fit_to_budget"),
    derivatives_by_rules=_later("differentiation.jax_derivatives", "derivatives_by_rules"),
    explain_tape=_later("insight.explain_tape", "explain_tape"),
)
