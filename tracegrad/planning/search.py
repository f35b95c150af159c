"""Plans of a program for any number of budgets, and the error where there is none."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Node, Occurrence, Recompute
from tracegrad.ir.wording import in_units
from tracegrad.planning.costs import nbytes
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.plan import RecomputePlan
from tracegrad.planning.planner import Planner
from tracegrad.planning.scans import in_steps
from tracegrad.planning.simulation import Segment, Simulation, keep_all, plan_to_keep, simulate


class BudgetTooSmall(ValueError):
    """No plan was found within the budget.

    Attributes:
      lowest: bytes, the lowest peak that a plan was found for: as XLA held it, if it was measured.
      measured_on: the backend and the JAX that `lowest` was measured on; "" for the model's.
      held_most: lines of the user's, and the bytes that are held of them where its peak is.
      in_the_way: what computes most of the program and no plan opens, with its line; "" if nothing.
    """

    def __init__(
        self,
        budget: int,
        lowest: int,
        measured_on: str = "",
        held_most: Sequence[tuple[str, int]] = (),
        of: str = "",
        in_the_way: str = "",
    ):
        self._arguments = budget, lowest, measured_on, held_most, of, in_the_way
        gradient = f" for the gradient of {of}" if of else ""
        text = f"a memory budget of {budget:,} bytes is too small{gradient}: the lowest peak that "
        text += f"was found is {lowest:,} bytes"
        text += f" as XLA held it ({measured_on})" if measured_on else ""
        if held_most:
            lines = (f"{line} ({in_units(size)})" for line, size in held_most)
            text += f". Most is held there of {', '.join(lines)}"
        if in_the_way:
            text += f". Most of the program is {in_the_way}"
        elif measured_on:
            text += (
                ". With a larger measure=, of plan_recompute or, in trace(..., rules=[...]), of "
                "tracegrad.planning.recompute_to_fit, more plans are tried"
            )
        super().__init__(text)
        self.lowest, self.measured_on = lowest, measured_on
        self.held_most, self.in_the_way = tuple(held_most), in_the_way

    def __reduce__(self) -> tuple[Any, ...]:  # for pickle: the arguments, not the message
        return type(self), self._arguments, self.__dict__


class Search:
    """Plans for one program, for any number of budgets; errors tell the bytes of so many `examples`
    as are computed at once, in a `jax.vmap` around, and all else is of one."""

    def __init__(self, whole: MemoryModel, examples: int = 1):
        assert whole.graph is not None
        self.whole, self.graph, self.examples = whole, whole.graph, examples

    @functools.cached_property
    def kept(self) -> Simulation:
        """With nothing recomputed."""
        return keep_all(self.whole)

    @functools.cached_property
    def _planner(self) -> Planner:
        return Planner(in_steps(self.whole))

    def best(self, target: int) -> RecomputePlan:
        """The plan within so many bytes of the model that computes the least again.

        Raises BudgetTooSmall, with the lowest peak of all, if there is none.
        """
        if self.kept.peak <= target:  # then there is nothing to plan
            return RecomputePlan(self, self.kept, (*plan_to_keep(self.whole),), target, target)
        found = self._planner.find(target)
        if found is None:
            raise self.too_small(self.examples * target, self.best(self.lowest_peak))
        return self.plan(found, target)

    def plan(self, segments: Sequence[Segment], target: int) -> RecomputePlan:
        """The plan of these segments."""
        if any(segment.step for segment in segments):
            in_steps(self.whole)
        found = simulate(self.whole, segments)
        return RecomputePlan(self, found, tuple(segments), target, target)

    def too_small(
        self, budget: int, lowest: RecomputePlan, measured_on: str = ""
    ) -> BudgetTooSmall:
        """The error for a budget, of the plan that keeps least of those that were found."""
        return BudgetTooSmall(
            budget,
            self.examples * self.lowest_peak if lowest.held is None else lowest.held,
            measured_on,
            _held_most(self.whole, lowest.segments, self.examples),
            self.graph.name,
            _in_the_way(self.graph),
        )

    @functools.cached_property
    def lowest_peak(self) -> int:
        """The lowest budget that there is a plan for, in the model."""
        return self._planner.lowest_peak()


def _is_closed(node: Node) -> bool:
    """Whether no plan opens it: a branch, a custom gradient, a `jax.checkpoint`."""
    return bool(node.regions) and node.primitive is not _jax.SCAN


def _line(node: Node) -> str:
    """Whose line it is, and what no plan opens."""
    line = str(Occurrence((), node).origin or node.op)
    return f"{line} ({node.op} as a whole)" if _is_closed(node) else line


def _in_the_way(graph: Graph) -> str:
    """The node that no plan opens, if more than half of the program's bytes are computed in it."""
    known: dict[Graph, int] = {}
    made = {node: _bytes_made(node, known) for node in graph.nodes}
    closed = [node for node in made if _is_closed(node)]
    node = max(closed, key=made.__getitem__, default=None)
    if node is None or 2 * made[node] <= sum(made.values()):
        return ""
    kind, cure = node.op, "give the budget to the function inside of it"
    if isinstance(node, Recompute):
        kind, cure = "jax.checkpoint", "leave it out, and the plan says what is computed again"
    elif isinstance(node, CustomGradient):
        kind = "custom gradient"
    origin = Occurrence((), node).origin
    where = f" at {origin}" if origin else ""
    return f"inside of the {kind} of {node.name}{where}, which no plan opens: {cure}"


def _bytes_made(node: Node, known: dict[Graph, int]) -> int:
    """Bytes of all that a node computes, with what its regions do, once each; `known` remembers
    those of regions, which may be shared."""
    for region in node.regions.values():
        if region not in known:
            known[region] = sum(_bytes_made(inner, known) for inner in region.nodes)
    inside = sum(known[region] for region in node.regions.values())
    return inside + sum(nbytes(value.aval) for value in node.outputs)


def _held_most(
    whole: MemoryModel, segments: Sequence[Segment], examples: int
) -> list[tuple[str, int]]:
    """The lines of which most is held, and the bytes, as the backward pass of the segment with the
    peak begins, in the model: what earlier segments and this one keep, and what is run again."""
    found, sizes = simulate(whole, segments), Counter[str]()
    for segment, local, peak in zip(segments, found.locals, found.peaks, strict=True):
        model, is_peak = whole.steps[segment.step], peak == found.peak
        for i in range(segment.start, segment.stop):
            if is_peak or not segment.recompute:
                sizes[_line(model.nodes[i])] += model.extra[i]
        again = set(local.recomputed).difference(local.late) if is_peak else ()
        for i in local.stored.union(again):
            sizes[_line(model.nodes[segment.start + i])] += model.sizes[segment.start + i]
        if is_peak:
            break
    return [(line, examples * size) for line, size in sizes.most_common(3) if size]
