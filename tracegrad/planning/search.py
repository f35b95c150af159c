"""The search for a plan: over all ways to run a program's scans, for any number of budgets."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tracegrad.planning.bounds import flops_bound, lowest_peak_bound
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.modelling import model
from tracegrad.planning.planner import BudgetTooSmall, Planner
from tracegrad.planning.scans import Variant, variants
from tracegrad.planning.simulation import Segment, Simulation, keep_all


@dataclass(frozen=True)
class Case:
    """One of the ways to run a program's scans."""

    number: int
    variant: Variant
    model: MemoryModel
    progress: Callable[[float], None]

    @functools.cached_property
    def kept(self) -> Simulation:
        """With nothing recomputed but in its scans."""
        return keep_all(self.model)

    @functools.cached_property
    def planner(self) -> Planner:
        return Planner(self.model, self.progress)


class Search:
    """Plans for one program, for any number of budgets, over all ways to run its scans."""

    def __init__(self, whole: MemoryModel, progress: Callable[[float], None] = lambda share: None):
        self.whole, self._progress = whole, progress
        self._variants = enumerate(variants(whole))
        self._known: list[Case] = []

    @functools.cached_property
    def kept(self) -> Simulation:
        """With nothing recomputed."""
        return keep_all(self.whole)

    def cases(self) -> Iterator[Case]:
        """From the one whose scans run the least again; each is made when it is asked for."""
        yield from self._known
        for number, variant in self._variants:
            planned = self.whole
            if number:
                planned = model(variant.graph, residuals=self.whole.residuals)
            case = Case(number, variant, planned, self._progress)
            self._known.append(case)
            yield case

    def best(self, budget: int) -> tuple[Case, list[Segment], Simulation]:
        """The plan within a budget that computes the least again.

        Raises BudgetTooSmall, with the lowest peak of all, if there is none.
        """
        best: tuple[Case, list[Segment], Simulation] | None = None
        least = 0
        for case in self.cases():
            if best is not None and case.variant.flops >= least:
                continue
            found = _segments(case, budget)
            if found is None:
                continue
            segments, simulation = found
            flops = simulation.flops + case.variant.flops
            if best is None or flops < least:
                best, least = (case, segments, simulation), flops
            if least == 0:
                break
        if best is None:
            raise BudgetTooSmall(budget, self.lowest_peak(), lowest_peak_bound(self.whole))
        return best

    def lowest_peak(self) -> int:
        return min(case.planner.lowest_peak() for case in self.cases())

    def flops_bound(self, budget: int, flops: int) -> int:
        """What no plan within a budget is below; `flops` is what one of them needs."""
        return min(flops, flops_bound(self.whole, budget)) if flops else 0


def _segments(case: Case, budget: int) -> tuple[list[Segment], Simulation] | None:
    if case.kept.peak <= budget:  # then there is nothing to plan, and no library is needed
        return [Segment(0, len(case.model))], case.kept
    return case.planner.find(budget)


class Progress:
    """A bar, if tqdm is there, once planning has taken more than a second."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.bar: Any = None

    def __call__(self, share: float) -> None:
        if self.bar is None:
            if time.monotonic() - self.began < 1:
                return
            try:
                # Not tqdm.auto, which warns in a notebook that has no ipywidgets.
                tqdm = importlib.import_module("tqdm").tqdm
            except ImportError:
                return
            self.bar = tqdm(total=100, desc="planning what to recompute", unit="%", leave=False)
        self.bar.update(round(100 * share) - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
