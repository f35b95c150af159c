"""`recompute_to_fit`: the rule that a memory budget is, for graphs that will be compiled."""

from __future__ import annotations

from dataclasses import dataclass

from tracegrad.ir import Graph
from tracegrad.ir.engine import engine
from tracegrad.ir.occurrence import is_under_rules
from tracegrad.planning.budget import MemoryBudget, budget_bytes
from tracegrad.planning.found import FOUND
from tracegrad.planning.offloading import Offload, transfer_flops
from tracegrad.planning.plan_recompute import plan_graph
from tracegrad.rewriting.edits import refuse_differentiated
from tracegrad.tracing.graphs import Rule


def recompute_to_fit(
    memory_budget: MemoryBudget, *, measure: bool = True, offload: Offload = False
) -> Rule:
    """The rule that makes a graph recompute what it must to stay within a memory budget.

    Args:
      memory_budget, measure, offload: as for `plan_recompute`.

    Returns:
      A function ``Graph -> Graph``. A graph that fits is returned as it is, and so is one that
      holds a loss to which the rule was applied where `tracegrad.grad` differentiated it.

    Raises:
      TypeError, ValueError: as `plan_recompute`, for a budget that is none, and for `offload`.
      GraphError: when it is applied to a program in which JAX has differentiated something, where
        recompute would save nothing any more.
    """
    budget_bytes(memory_budget, 1 << 40)
    transfer = transfer_flops(offload, measure)
    # Of one budget there is one rule, so that functions traced with it again share their programs.
    # Of budgets 1 is a byte, and 1.0 is all.
    key = "rule", type(memory_budget), memory_budget, measure, transfer
    known: Rule | None = FOUND.get(key)
    if known is None:
        known = FOUND.put(key, _FitToBudget(memory_budget, measure, transfer))
    return known


@dataclass(frozen=True, eq=False)
class _FitToBudget:
    memory_budget: MemoryBudget
    measure: bool
    transfer: float

    def __call__(self, graph: Graph) -> Graph:
        places = list(graph.walk())
        if any(map(is_under_rules, places)):
            return graph
        for place in places:
            refuse_differentiated(place, self)
        plan = plan_graph(graph, self.memory_budget, measure=self.measure, transfer=self.transfer)
        return plan.rewritten() if plan.is_needed else graph

    def __repr__(self) -> str:
        return f"memory_budget={self.memory_budget!r}"


engine.fit_to_budget = recompute_to_fit
