"""The cheapest plan that XLA was seen to hold within a budget.

The model says which plan is good; how much of it XLA keeps, and what it needs beside, depends on
the backend. So gradients are compiled, and what XLA holds corrects the bytes that the model plans
for. A few are enough: what they have to find is little more than one ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.planning.bounds import lowest_peak_bound
from tracegrad.planning.search import BudgetTooSmall, Fit, Search
from tracegrad.planning.tuning import TUNING


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
    while len(tried) < TUNING.rounds or (
        len(tried) == TUNING.rounds and not _within(tried, budget)
    ):
        fit = _planned(search, target, tried)
        if any(map(fit.is_same, tried)):
            break
        tried.append(replace(fit, held=held_by(fit.rewritten())))
        if fit.flops == 0 and _within(tried, budget):
            break
        target = _next(tried, budget, peak)
    if not _within(tried, budget):
        lowest = search.best(search.lowest_peak)
        if not any(map(lowest.is_same, tried)):
            tried.append(replace(lowest, held=held_by(lowest.rewritten())))
    within = _within(tried, budget)
    if not within:
        lowest = min(tried, key=_held)
        bound = lowest_peak_bound(search.whole)
        raise BudgetTooSmall(budget, _held(lowest), bound, _jax.compiled_by(), lowest.held_most())
    return min(within, key=lambda fit: (fit.flops, _held(fit)))


def _planned(search: Search, target: int, tried: Sequence[Fit]) -> Fit:
    """The plan for a target; if the model has none, that between its lowest peak and the last plan.

    That of the lowest itself computes the most again, and XLA may hold more of it than of others.
    """
    try:
        return search.best(target)
    except BudgetTooSmall:
        lowest = search.lowest_peak
        last = tried[-1].simulation.peak if tried else lowest
        return search.best((lowest + last) // 2)


def _next(tried: list[Fit], budget: int, peak: int) -> int:
    """What to plan for next: as many bytes more or fewer as XLA held of the last plan, between
    those that were within the budget and those that were not."""
    within = [fit.simulation.peak for fit in _within(tried, budget)]
    over = [fit.simulation.peak for fit in tried if _held(fit) > budget]
    last = tried[-1]
    target = last.simulation.peak * budget / max(1, _held(last))
    if not within:
        return int(TUNING.careful ** (2 * len(tried) - 1) * target)
    low, high = max(within), min([*over, peak])
    return int(target if low < target < high else (low + high) / 2)


def _within(tried: Sequence[Fit], budget: int) -> list[Fit]:
    return [fit for fit in tried if _held(fit) <= budget]


def _held(fit: Fit) -> int:
    assert fit.held is not None
    return fit.held
