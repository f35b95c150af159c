"""The cheapest plan that XLA was seen to hold within a budget.

The model says which plan is good; how much of it XLA keeps, and what it needs beside, depends on
the backend. So gradients are compiled, and what XLA holds corrects the bytes that the model plans
for. A few are enough: what they have to find is little more than one ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.planning.bounds import lowest_peak_bound
from tracegrad.planning.planner import BudgetTooSmall
from tracegrad.planning.regions import with_regions
from tracegrad.planning.search import Case, Search
from tracegrad.planning.simulation import Segment, Simulation

ROUNDS = 2  # plans that are compiled; where none of them is within the budget, up to two more
CLOSE = 0.97  # of the budget: a plan that holds so much is not made cheaper
FREE = 0.002  # of the forward pass: one that costs no more is not made cheaper
CAREFUL = 0.97  # of what is planned for next, for each plan that was not within the budget


@dataclass(frozen=True)
class Fit:
    """A plan, and what XLA holds for it: None if it was not measured.

    `target`: bytes that it was planned for in the model.
    """

    case: Case
    segments: tuple[Segment, ...]
    simulation: Simulation
    target: int
    held: int | None = None

    @property
    def flops(self) -> int:
        return self.simulation.flops + self.case.variant.flops

    def rewritten(self) -> Graph:
        return with_regions(self.case.model, self.segments)


def planned(search: Search, target: int) -> Fit:
    """The cheapest plan in the model. Raises BudgetTooSmall."""
    case, segments, simulation = search.best(target)
    return Fit(case, tuple(segments), simulation, target)


def fitted(search: Search, budget: int, held_by: Callable[[Graph], int], held_without: int) -> Fit:
    """The cheapest plan found that XLA holds within a budget.

    Args:
      budget: bytes.
      held_by: compiles the gradient of a program and tells the bytes.
      held_without: what XLA holds with nothing recomputed, which is more.

    Raises BudgetTooSmall if XLA held more for every plan, down to the lowest of the model.
    """
    peak = search.kept.peak
    target = budget * peak // held_without
    tried: list[Fit] = []
    while len(tried) < ROUNDS or (len(tried) == ROUNDS and not _within(tried, budget)):
        try:
            fit = planned(search, target)
        except BudgetTooSmall:
            break
        if any(fit.segments == f.segments and fit.case is f.case for f in tried):
            break
        fit = replace(fit, held=held_by(fit.rewritten()))
        tried.append(fit)
        assert fit.held is not None
        is_cheap = fit.flops <= FREE * search.whole.total_flops
        if fit.held <= budget and (is_cheap or fit.held >= CLOSE * budget):
            break
        target = _next(tried, budget, peak)
    if not _within(tried, budget):
        lowest = planned(search, search.lowest_peak())
        if all(lowest.segments != fit.segments or lowest.case is not fit.case for fit in tried):
            tried.append(replace(lowest, held=held_by(lowest.rewritten())))
    within = _within(tried, budget)
    if not within:
        held = min(map(_held, tried))
        raise BudgetTooSmall(budget, held, lowest_peak_bound(search.whole), _jax.compiled_by())
    return min(within, key=lambda fit: (fit.flops, _held(fit)))


def _next(tried: list[Fit], budget: int, peak: int) -> int:
    """What to plan for next: as many bytes more or fewer as XLA held of the last plan, between
    those that were within the budget and those that were not."""
    within = [fit.simulation.peak for fit in _within(tried, budget)]
    over = [fit.simulation.peak for fit in tried if _held(fit) > budget]
    last = tried[-1]
    target = last.simulation.peak * budget / max(1, _held(last))
    if not within:
        return int(CAREFUL ** (2 * len(tried) - 1) * target)
    low, high = max(within), min([*over, peak])
    return int(target if low < target < high else (low + high) / 2)


def _within(tried: Sequence[Fit], budget: int) -> list[Fit]:
    return [fit for fit in tried if _held(fit) <= budget]


def _held(fit: Fit) -> int:
    assert fit.held is not None
    return fit.held
