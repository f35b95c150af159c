"""The cheapest plan that XLA was seen to hold within a budget.

The model says which plan is good; how much of it XLA keeps, and what it needs beside, depends on
the backend. So gradients are compiled, and what XLA holds corrects the bytes that the model plans
for. Two are enough: what they have to find is little more than one ratio.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from tracegrad.ir import Graph
from tracegrad.planning.plan import RecomputePlan
from tracegrad.planning.search import BudgetTooSmall, Search
from tracegrad.planning.tuning import TUNING


def fitted(
    search: Search,
    budget: int,
    held_by: Callable[[Graph], int],
    held_without: int,
    plans: int,
    measured_on: str,
) -> RecomputePlan:
    """The cheapest plan found that XLA holds within a budget.

    Args:
      held_by: compiles the gradient of a program and tells the bytes.
      held_without: those with nothing recomputed. If they are within the budget, that stays.
      plans: how many are compiled at most.

    Raises BudgetTooSmall if XLA held more for each plan that was compiled.
    """
    done = functools.partial(
        replace, budget=budget, held_without=held_without, measured_on=measured_on
    )
    if held_without <= budget:
        return done(replace(search.best(search.kept.peak), held=held_without))
    tried: list[RecomputePlan] = []
    target = int(TUNING.careful * budget * search.kept.peak / held_without)
    while True:
        fit = _planned(search, target)
        most = min([search.kept.peak, *(f.peak for f in tried if _held(f) > budget)])
        while fit.segments in [f.segments for f in tried] and fit.peak <= target < most:
            target = int(target / TUNING.careful**0.5)  # plans come in steps: the next larger one
            fit = _planned(search, min(target, most - 1))
        is_known = fit.segments in [f.segments for f in tried]
        if is_known or not _spares_enough(fit.flops, tried, budget):
            break
        tried.append(replace(fit, held=held_by(fit.rewritten())))
        if len(tried) == plans or not _spares_enough(0, tried, budget):
            break
        is_last = len(tried) == plans - 1
        target = _next(search, tried, budget, held_without, is_last)
    within = [fit for fit in tried if _held(fit) <= budget]
    if not within:
        raise search.too_small(budget, min(tried, key=_held), measured_on)
    return done(min(within, key=lambda fit: (fit.flops, _held(fit))))


def _spares_enough(flops: int, tried: Sequence[RecomputePlan], budget: int) -> bool:
    """Whether a plan of so many FLOPs is worth compiling beside those that were compiled."""
    within = (fit for fit in tried if _held(fit) <= budget)
    best = min(within, key=lambda fit: fit.flops, default=None)
    if best is None:
        return True
    least = max(TUNING.spared * best.forward_flops, TUNING.spared_of_it * best.flops)
    return best.flops - flops > least


def _planned(search: Search, target: int) -> RecomputePlan:
    """The model's plan for a target, or that of its lowest peak."""
    try:
        return search.best(target)
    except BudgetTooSmall:
        return search.best(search.lowest_peak)


def _next(
    search: Search, tried: Sequence[RecomputePlan], budget: int, held_without: int, is_last: bool
) -> int:
    """What to plan for next: halfway between the largest plan that was within the budget and the
    next larger one that was not. Before there are both, most of the way to as many bytes more as
    XLA held less of the last plan; or, where that was too much, somewhat fewer than by as many
    bytes, for the last plan three times as many or somewhat fewer again. Where XLA's bytes fell so
    little from the next larger plan to this one, or rose, that not even those are few enough,
    somewhat fewer than that asks for; but, unless that is none at all, not the very fewest that
    there is a plan for, which costs the most by far, and of which XLA often holds no less."""
    peak, last = search.kept.peak, tried[-1]
    here, held = last.peak, max(1, _held(last))
    fits = max((fit.peak for fit in tried if _held(fit) <= budget), default=0)
    misses = [fit.peak for fit in tried if _held(fit) > budget]
    above = min((size for size in misses if size > fits), default=0)
    if fits and above:
        return (fits + above) // 2
    target = here * budget / held
    if held <= budget:
        return int(here + TUNING.ahead * (min(target, peak) - here))
    sizes = [(peak, held_without), *((fit.peak, _held(fit)) for fit in tried)]
    larger, then = min((size for size in sizes if size[0] > here), default=(here, held))
    less = here - (held - budget) * (larger - here) / max(1, then - held)
    margin = max(TUNING.careful, (budget / held) ** 2) if is_last else 1
    careful = TUNING.careful * margin * target
    if less < careful:
        fewest = TUNING.fewest * search.lowest_peak if less > 0 else 0
        careful = max(TUNING.careful * less, fewest)
    return int(careful)


def _held(fit: RecomputePlan) -> int:
    assert fit.held is not None
    return fit.held
