"""The cheapest plan that XLA was seen to hold within a budget.

The model says which plan is good; how much of it XLA keeps, and what it needs beside, depends on
the backend. So gradients are compiled, and what XLA holds corrects the bytes that the model plans
for. Two are enough: what they have to find is little more than one ratio.
"""

from __future__ import annotations

import contextlib
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

    Raises BudgetTooSmall if XLA held more for each plan that was compiled.
    """
    tried: list[Fit] = []
    target = budget * search.kept.peak // held_without
    targets = [int(TUNING.careful * target), target]
    for _ in range(TUNING.rounds):
        fit = _planned(search, targets)
        if any(map(fit.is_same, tried)):
            break
        tried.append(replace(fit, held=held_by(fit.rewritten())))
        if fit.flops == 0 and _held(tried[-1]) <= budget:
            break
        targets = [_next(tried[-1], budget, search.kept.peak)]
    within = [fit for fit in tried if _held(fit) <= budget]
    if not within:
        lowest = min(tried, key=_held)
        bound = lowest_peak_bound(search.whole)
        raise BudgetTooSmall(budget, _held(lowest), bound, _jax.compiled_by(), lowest.held_most())
    return min(within, key=lambda fit: (fit.flops, _held(fit)))


def _planned(search: Search, targets: Sequence[int]) -> Fit:
    """The plan for the first of these targets that the model has one for; else that of its lowest
    peak."""
    for target in targets:
        with contextlib.suppress(BudgetTooSmall):
            return search.best(target)
    return search.best(search.lowest_peak)


def _next(last: Fit, budget: int, peak: int) -> int:
    """What to plan for next: as many bytes more or fewer as XLA held of the last plan, and fewer
    still where that was too much; halfway to everything, where it says that all would fit."""
    here = last.simulation.peak
    target = here * budget / max(1, _held(last))
    if _held(last) > budget:
        return int(TUNING.careful**2 * target)
    return int(target if here < target < peak else (here + peak) / 2)


def _held(fit: Fit) -> int:
    assert fit.held is not None
    return fit.held
