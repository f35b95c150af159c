"""What lower rooms need of those above them: to lower, trace, plan and explain.

Each room gives its own when it is imported, so that the lower ones need not know it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph
    from tracegrad.ir.nodes import Literal, Node, Value


class Insertable(Protocol):
    """A program that can be written into a graph: another graph, or what JAX has traced."""

    @property
    def out_avals(self) -> list[Any]: ...

    @property
    def effects(self) -> Collection[Any]: ...

    def written_into(
        self, place: Graph, inputs: Sequence[Value | Literal], beside: Node | None
    ) -> tuple[list[Node], list[Value | Literal]]:
        """Its nodes as nodes of a graph, in which they stand nowhere yet, and its outputs.

        `inputs`: what stands for its own. `beside`: the node whose line they have.
        """


def _later(file: str, what: str) -> Callable[..., Any]:
    """What a file gives that nobody has imported yet: it is imported at the first call."""

    def first(*args: Any) -> Any:
        importlib.import_module(f"tracegrad.{file}")  # and puts its own in the place of this
        return getattr(engine, what)(*args)

    return first


@dataclass
class Engine:
    """`to_callable`: the function that a graph computes. `trace_at`: what a function is
    traced to on flat arguments of these types, in the place of a graph that it is to be written
    into.
    `fit_to_budget`: the rule that makes a graph recompute what it must to stay within a budget.
    `derivatives_by_rules`: a block in which JAX's own derivatives go by the rules in force.
    `explain_tape`: why the gradients of a tape are what they are."""

    to_callable: Callable[[Graph], Callable[..., Any]]
    trace_at: Callable[[Callable[..., Any], Sequence[Any], Graph], Insertable]
    fit_to_budget: Callable[[Any], Callable[[Graph], Graph]]
    derivatives_by_rules: Callable[[], AbstractContextManager[None]]
    explain_tape: Callable[..., Any]


engine = Engine(
    to_callable=_later("tracing.callable", "to_callable"),
    trace_at=_later("tracing.graphs", "trace_at"),
    fit_to_budget=_later("planning.plan_recompute", "fit_to_budget"),
    derivatives_by_rules=_later("differentiation.jax_derivatives", "derivatives_by_rules"),
    explain_tape=_later("insight.explain_tape", "explain_tape"),
)
