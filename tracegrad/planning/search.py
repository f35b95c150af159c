"""Finds the recomputation plans of a program within memory budgets, or raises BudgetTooSmall."""

from __future__ import annotations

import functools
from typing import Any

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Node, Occurrence, Recompute
from tracegrad.planning.costs import nbytes
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.plan import RecomputePlan
from tracegrad.planning.planner import Planner
from tracegrad.planning.regions import with_planned_regions
from tracegrad.planning.scans import fill_steps
from tracegrad.planning.simulation import Segment, Simulation, keep_all, plan_to_keep, simulate


class BudgetTooSmall(ValueError):
    """No plan was found within the budget.

    Attributes:
      lowest: the lowest peak of the tried plans, in bytes: measured in XLA, or by the model.
      measured_on: the backend and the JAX version that measured `lowest`; "" if the model did.
      in_the_way: describes an operation that computes more than half of the program's bytes and
        that no plan can split, with its line; "" without such an operation.
    """

    def __init__(
        self,
        budget: int,
        lowest: int,
        measured_on: str = "",
        of: str = "",
        in_the_way: str = "",
    ):
        self._arguments = budget, lowest, measured_on, of, in_the_way
        gradient = f" for the gradient of {of}" if of else ""
        text = f"a memory budget of {budget:,} bytes is too small{gradient}: the lowest peak "
        text += f"found is {lowest:,} bytes"
        text += f", measured in XLA ({measured_on})" if measured_on else ""
        if in_the_way:
            text += f". Most of the program is {in_the_way}"
        elif measured_on:
            text += (
                ". To try more plans, pass a larger measure= to plan_recompute, or to "
                "tracegrad.planning.recompute_to_fit in trace(..., rules=[...])"
            )
        super().__init__(text)
        self.lowest, self.measured_on, self.in_the_way = lowest, measured_on, in_the_way

    def __reduce__(self) -> tuple[Any, ...]:  # for pickle: the arguments, not the message
        return type(self), self._arguments, self.__dict__


class Search:
    """Finds plans of one program for any number of budgets.

    Bytes are for one example. Only the budget and the lowest peak in an error are for all
    `examples`, the number of examples that the enclosing `jax.vmap`s compute together.
    """

    def __init__(self, whole: MemoryModel, examples: int = 1):
        assert whole.graph is not None
        self.whole, self.graph, self.examples = whole, whole.graph, examples
        self._rewritten: dict[tuple[Segment, ...], Graph] = {}

    @functools.cached_property
    def kept(self) -> Simulation:
        return keep_all(self.whole)

    @functools.cached_property
    def _planner(self) -> Planner:
        return Planner(fill_steps(self.whole))

    def best(self, target: int) -> RecomputePlan:
        """Returns the plan that recomputes least, among the plans with a modelled peak of at most
        `target` bytes. Without such a plan, raises BudgetTooSmall, with the lowest peak of all
        plans."""
        if self.kept.peak <= target:  # nothing must be recomputed
            return RecomputePlan(self, self.kept, (*plan_to_keep(self.whole),), target, target)
        segments = self._planner.find(target)
        if segments is None:
            raise self.too_small(self.examples * target, self.best(self.lowest_peak))
        simulation = simulate(self.whole, segments)
        return RecomputePlan(self, simulation, tuple(segments), target, target)

    def rewritten(self, segments: tuple[Segment, ...]) -> Graph:
        if segments not in self._rewritten:
            self._rewritten[segments] = with_planned_regions(self.whole, segments)
        return self._rewritten[segments]

    def too_small(
        self, budget: int, lowest: RecomputePlan, measured_on: str = ""
    ) -> BudgetTooSmall:
        """Returns the error for a budget; `lowest` is the plan with the lowest peak."""
        return BudgetTooSmall(
            budget,
            self.examples * self.lowest_peak if lowest.held is None else lowest.held,
            measured_on,
            self.graph.name,
            _describe_unsplittable(self.graph),
        )

    @functools.cached_property
    def lowest_peak(self) -> int:
        """The lowest peak that a plan has by the model, in bytes for one example."""
        return self._planner.lowest_peak()


def _is_unsplittable(node: Node) -> bool:
    """Whether a node has regions and is not a scan: it is a branch, a custom gradient, a
    `jax.checkpoint`."""
    return bool(node.regions) and node.primitive is not _jax.SCAN


def _describe_unsplittable(graph: Graph) -> str:
    """Describes the unsplittable node that computes more than half of the program's bytes; returns
    "" if there is none."""
    known: dict[Graph, int] = {}
    computed = {node: _bytes_computed(node, known) for node in graph.nodes}
    unsplittable = [node for node in computed if _is_unsplittable(node)]
    node = max(unsplittable, key=computed.__getitem__, default=None)
    if node is None or 2 * computed[node] <= sum(computed.values()):
        return ""
    kind, cure = node.op, "set the budget on the function inside it"
    if isinstance(node, Recompute):
        kind, cure = "jax.checkpoint", "remove it, and the plan decides what to recompute"
    elif isinstance(node, CustomGradient):
        kind = "custom gradient"
    origin = Occurrence((), node).origin
    where = f" at {origin}" if origin else ""
    return f"inside the {kind} of {node.name}{where}, which no plan can split: {cure}"


def _bytes_computed(node: Node, known: dict[Graph, int]) -> int:
    """Returns the bytes of all values that a node and the nodes in its regions compute. A loop body
    counts as one iteration. `known` caches the bytes of regions, since nodes may share a region."""
    for region in node.regions.values():
        if region not in known:
            known[region] = sum(_bytes_computed(inner, known) for inner in region.nodes)
    inside = sum(known[region] for region in node.regions.values())
    return inside + sum(nbytes(value.aval) for value in node.outputs)
