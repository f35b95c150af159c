"""The search for a plan: over all ways to run a program's scans, for any number of budgets."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from tracegrad.ir import Graph
from tracegrad.planning.bounds import flops_bound, lowest_peak_bound
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.modelling import model
from tracegrad.planning.planner import Planner
from tracegrad.planning.regions import with_regions
from tracegrad.planning.scans import Variant, variants
from tracegrad.planning.simulation import Segment, Simulation, keep_all


class BudgetTooSmall(ValueError):
    """No plan was found within the budget.

    Attributes:
      lowest: bytes, the lowest peak that a plan was found for: as XLA held it, if it was measured.
      bound: bytes, below which no plan can be, in the planner's model.
      measured_on: the backend and the JAX that `lowest` was measured on; "" for the model's.
    """

    def __init__(self, budget: int, lowest: int, bound: int, measured_on: str = ""):
        held = f" as XLA held it ({measured_on})" if measured_on else ""
        model = " in the planner's model" if measured_on else ""
        # Of tiny programs XLA holds less than the model does, of which the bound says nothing.
        least = f", and none below {bound:,} bytes is possible{model}" if bound <= lowest else ""
        super().__init__(
            f"a memory budget of {budget:,} bytes is too small: the lowest peak that was found is "
            f"{lowest:,} bytes{held}{least}"
        )
        self.lowest, self.bound, self.measured_on = lowest, bound, measured_on


@dataclass(frozen=True)
class Case:
    """One of the ways to run a program's scans."""

    number: int
    variant: Variant
    model: MemoryModel

    @functools.cached_property
    def planner(self) -> Planner:
        return Planner(self.model)


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


class Search:
    """Plans for one program, for any number of budgets, over all ways to run its scans."""

    def __init__(self, whole: MemoryModel):
        assert whole.graph is not None
        self.whole, self.graph = whole, whole.graph
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
                known, transfer = self.whole.residuals, self.whole.transfer
                planned = model(variant.graph, residuals=known, transfer=transfer)
            case = Case(number, variant, planned)
            self._known.append(case)
            yield case

    def best(self, target: int) -> Fit:
        """The plan within so many bytes of the model that computes the least again.

        Raises BudgetTooSmall, with the lowest peak of all, if there is none.
        """
        best: Fit | None = None
        for case in self.cases():
            if best is not None and case.variant.flops >= best.flops:
                continue
            found = case.planner.find(target)
            if found is None:
                continue
            fit = Fit(case, tuple(found[0]), found[1], target)
            if best is None or fit.flops < best.flops:
                best = fit
            if best.flops == 0:
                break
        if best is None:
            raise BudgetTooSmall(target, self.lowest_peak(), lowest_peak_bound(self.whole))
        return best

    def lowest_peak(self) -> int:
        """The lowest in the model."""
        return min(case.planner.lowest_peak() for case in self.cases())

    def flops_bound(self, budget: int, flops: int) -> int:
        """What no plan within a budget is below; `flops` is what one of them needs."""
        return min(flops, flops_bound(self.whole, budget)) if flops else 0
