"""Finds the cheapest plan that XLA, as measured, holds within a budget.

The model ranks plans, but the bytes that XLA holds for a plan depend on the backend. So gradients
are compiled, and the bytes that XLA holds correct the *target*, the peak that the model plans for.
Two compilations are usually enough, because they have to find little more than one ratio.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from tracegrad.ir import Graph
from tracegrad.planning.costs import nbytes
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
    """Returns the cheapest plan found that XLA holds within a budget.

    Args:
      held_by: compiles the gradient of a program and returns the bytes that XLA holds.
      held_without: the bytes that XLA holds with nothing recomputed. If they are within the
        budget, nothing is recomputed.
      plans: the maximum number of plans to compile.

    Raises BudgetTooSmall if XLA holds more than the budget for each compiled plan.
    """
    done = functools.partial(
        replace, budget=budget, held_without=held_without, measured_on=measured_on
    )
    unplanned = replace(search.best(search.kept.peak), held=held_without)
    if held_without <= budget:
        return done(unplanned)
    tried: list[RecomputePlan] = []
    lent = _lent_bytes(search) if held_without < search.kept.peak else 0
    target = int(lent + TUNING.careful * budget * (search.kept.peak - lent) / held_without)
    while True:
        fit = _plan_for_target(search, target)
        most = min([search.kept.peak, *(f.peak for f in tried if _measured_bytes(f) > budget)])
        while fit.segments in [f.segments for f in tried] and fit.peak <= target < most:
            target = int(target / TUNING.careful**0.5)  # tried already: take the next larger plan
            fit = _plan_for_target(search, min(target, most - 1))
        is_known = fit.segments in [f.segments for f in tried]
        if is_known or not _spares_enough(fit.flops, tried, budget):
            break
        tried.append(replace(fit, held=held_by(fit.rewritten())))
        if len(tried) == plans or not _spares_enough(0, tried, budget):
            break
        is_last = len(tried) == plans - 1
        target = _next_target(search, tried, budget, held_without, is_last)
    within = [fit for fit in tried if _measured_bytes(fit) <= budget]
    if not within:
        raise search.too_small(budget, min([unplanned, *tried], key=_measured_bytes), measured_on)
    return done(min(within, key=lambda fit: (fit.flops, _measured_bytes(fit))))


def _lent_bytes(search: Search) -> int:
    """Returns the bytes of the values that can wait in the buffers of results, for which XLA holds
    no other memory. Until a gradient is computed, its buffer lends room to the largest value that
    fits; at most half of the peak is lent."""
    sizes, whole = sorted(search.whole.sizes), search.whole
    gradients = (nbytes(v.aval) for v in search.graph.inputs if v in whole.active)
    fitting = (bisect.bisect_right(sizes, size) for size in gradients)
    return min(sum(sizes[k - 1] for k in fitting if k), search.kept.peak // 2)


def _spares_enough(flops: int, tried: Sequence[RecomputePlan], budget: int) -> bool:
    """Whether a plan with these FLOPs saves enough, compared to the tried plans, to compile it."""
    within = (fit for fit in tried if _measured_bytes(fit) <= budget)
    best = min(within, key=lambda fit: fit.flops, default=None)
    if best is None:
        return True
    least = max(TUNING.spared * best.forward_flops, TUNING.spared_of_it * best.flops)
    return best.flops - flops > least


def _plan_for_target(search: Search, target: int) -> RecomputePlan:
    """Returns the model's plan for a target; without such a plan, the plan with the lowest peak."""
    try:
        return search.best(target)
    except BudgetTooSmall:
        return search.best(search.lowest_peak)


def _next_target(
    search: Search, tried: Sequence[RecomputePlan], budget: int, held_without: int, is_last: bool
) -> int:
    """Returns the next target, in bytes of the model; `tried[-1]` is the last plan.

    1. If some plan fits the budget and a larger plan does not, the target is halfway between the
       largest plan that fits and the next larger plan that does not.
    2. Otherwise, if the last plan fits, the target goes `TUNING.ahead` of the way from its peak to
       ``peak * budget / held`` (at most the peak with nothing recomputed).
    3. Otherwise the target is ``peak * budget / held`` times `TUNING.careful`. The last compilation
       multiplies it also by ``(budget / held) ** 2``, or by `careful` if that is larger.
    4. `less` is the peak at which XLA would hold the budget, extrapolated from the last plan and
       the next larger plan. If `less` is below the target of 3, because XLA's bytes fell little or
       rose, the target is `less` times `careful`, but at least `TUNING.fewest` times the lowest
       peak, if the last plan was larger: the plan with the lowest peak costs the most by far, and
       XLA often holds as many bytes for it as for the next plan, or more.
    """
    peak, last = search.kept.peak, tried[-1]
    here, held = last.peak, max(1, _measured_bytes(last))
    fits = max((fit.peak for fit in tried if _measured_bytes(fit) <= budget), default=0)
    misses = [fit.peak for fit in tried if _measured_bytes(fit) > budget]
    above = min((size for size in misses if size > fits), default=0)
    if fits and above:
        return (fits + above) // 2
    target = here * budget / held
    if held <= budget:
        return int(here + TUNING.ahead * (min(target, peak) - here))
    sizes = [(peak, held_without), *((fit.peak, _measured_bytes(fit)) for fit in tried)]
    larger, then = min((size for size in sizes if size[0] > here), default=(here, held))
    less = here - (held - budget) * (larger - here) / max(1, then - held)
    margin = max(TUNING.careful, (budget / held) ** 2) if is_last else 1
    careful = TUNING.careful * margin * target
    if less < careful:
        fewest = min(TUNING.fewest * search.lowest_peak, here - 1)
        careful = max(TUNING.careful * less, fewest)
    return int(careful)


def _measured_bytes(fit: RecomputePlan) -> int:
    assert fit.held is not None
    return fit.held
