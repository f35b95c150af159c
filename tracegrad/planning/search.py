"""The search for a plan: over all ways to run a program's scans, for any number of budgets."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tracegrad import _jax
from tracegrad.ir import Graph, Node, Occurrence
from tracegrad.ir.wording import in_units
from tracegrad.planning.bounds import flops_bound, lowest_peak_bound
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.modelling import model
from tracegrad.planning.regions import with_regions
from tracegrad.planning.scans import Variant, variants
from tracegrad.planning.simulation import Segment, Simulation, keep_all


class BudgetTooSmall(ValueError):
    """No plan was found within the budget.

    Attributes:
      lowest: bytes, the lowest peak that a plan was found for: as XLA held it, if it was measured.
      bound: bytes, below which no plan can be, in the planner's model.
      measured_on: the backend and the JAX that `lowest` was measured on; "" for the model's.
      held_most: lines of the user's, and the bytes that are held of them where its peak is.
    """

    def __init__(
        self,
        budget: int,
        lowest: int,
        bound: int,
        measured_on: str = "",
        held_most: Sequence[tuple[str, int]] = (),
        hint: str = "",
        of: str = "",
    ):
        held = f" as XLA held it ({measured_on})" if measured_on else ""
        model = " in the planner's model" if measured_on else ""
        # Of tiny programs XLA holds less than the model does, of which the bound says nothing.
        least = f", and none below {bound:,} bytes is possible{model}" if bound <= lowest else ""
        super().__init__(
            f"a memory budget of {budget:,} bytes is too small"
            + (f" for the gradient of {of}" if of else "")
            + f": the lowest peak that was found is {lowest:,} bytes{held}{least}"
            + (f". Most is held there of {_listed(held_most)}" if held_most else "")
            + hint
            + (f". {_MORE_PLANS}" if measured_on else "")
        )
        self.lowest, self.bound, self.measured_on = lowest, bound, measured_on
        self.held_most = tuple(held_most)


_MORE_PLANS = (
    "With a larger measure=, of plan_recompute or, in trace(..., rules=[...]), of "
    "tracegrad.planning.recompute_to_fit, more plans are tried"
)


def _listed(held: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{line} ({in_units(size)})" for line, size in held)


def _line(node: Node) -> str:
    origin = Occurrence((), node).origin
    return node.op if origin is None else str(origin)


@dataclass(frozen=True)
class Fit:
    """A plan, and what XLA holds for it: None if it was not measured.

    `target`: bytes that it was planned for in the model.
    """

    variant: Variant
    segments: tuple[Segment, ...]
    simulation: Simulation
    target: int
    held: int | None = None

    @property
    def flops(self) -> int:
        return self.simulation.flops + self.variant.flops

    def rewritten(self) -> Graph:
        return with_regions(self.variant.model, self.segments)

    def is_same(self, other: Fit) -> bool:
        """Whether it is the same plan."""
        return self.segments == other.segments and self.variant is other.variant

    def held_most(self, count: int = 3) -> list[tuple[str, int]]:
        """The lines of which most is held, and the bytes, as the backward pass of the segment with
        the peak begins, in the model: what earlier segments and this one keep, and what is run
        again."""
        model, found = self.variant.model, self.simulation
        sizes: Counter[str] = Counter()
        for segment, local, peak in zip(self.segments, found.locals, found.peaks, strict=True):
            is_there = peak == found.peak or not segment.recompute
            for i in range(segment.start, segment.stop):
                sizes[_line(model.nodes[i])] += model.extra[i] if is_there else 0
            for i in local.stored.union(local.recomputed if peak == found.peak else ()):
                sizes[_line(model.nodes[i])] += model.sizes[i]
            if peak == found.peak:
                break
        return [(line, size) for line, size in sizes.most_common(count) if size]

    def closed(self) -> str:
        """A sentence about what keeps a third of the peak or more in regions that no plan opens: a
        branch, a custom gradient, a `jax.shard_map`; "" if nothing does."""
        model = self.variant.model
        kept = [
            (extra, node)
            for extra, node in zip(model.extra, model.nodes, strict=True)
            if node.regions and node.primitive is not _jax.SCAN
        ]
        most, node = max(kept, key=operator.itemgetter(0), default=(0, None))
        if node is None or 3 * most < self.simulation.peak:
            return ""
        return (
            f". What {node.op} at {_line(node)} keeps is kept, or run again, as a whole: "
            "jax.checkpoint or rules.recompute of what is in it may free more"
        )


class Search:
    """Plans for one program, for any number of budgets, over all ways to run its scans.

    Errors tell the bytes of so many `examples` as are computed at once, in a `jax.vmap` around; all
    else is of one.
    """

    def __init__(self, whole: MemoryModel, examples: int = 1):
        assert whole.graph is not None
        self.whole, self.graph, self.examples = whole, whole.graph, examples
        modelled = functools.partial(model, residuals=whole.residuals, transfer=whole.transfer)
        self._to_come = variants(whole, modelled)
        self._known: list[Variant] = []

    @functools.cached_property
    def kept(self) -> Simulation:
        """With nothing recomputed."""
        return keep_all(self.whole)

    def variants(self) -> Iterator[Variant]:
        """From the one whose scans run the least again; each is made when it is asked for."""
        yield from self._known
        for variant in self._to_come:
            self._known.append(variant)
            yield variant

    def best(self, target: int) -> Fit:
        """The plan within so many bytes of the model that computes the least again.

        Raises BudgetTooSmall, with the lowest peak of all, if there is none.
        """
        likely = (variant for variant in self.variants() if variant.least <= target)
        others = (variant for variant in self.variants() if variant.least > target)
        best = self._cheapest(target, likely) or self._cheapest(target, others)
        if best is None:
            raise self.too_small(self.examples * target, self.best(self.lowest_peak))
        return best

    def _cheapest(self, target: int, variants: Iterable[Variant]) -> Fit | None:
        best: Fit | None = None
        for variant in variants:
            if best is not None and variant.flops >= best.flops:
                continue
            found = variant.planner.find(target)
            if found is None:
                continue
            fit = Fit(variant, tuple(found[0]), found[1], target)
            if best is None or fit.flops < best.flops:
                best = fit
            if best.flops == 0:
                break
        return best

    def too_small(self, budget: int, lowest: Fit, measured_on: str = "") -> BudgetTooSmall:
        """The error for a budget, of the plan that keeps least of those that were found."""
        held = self.examples * self.lowest_peak if lowest.held is None else lowest.held
        most, hint = lowest.held_most(), lowest.closed()
        name = self.graph.name
        return BudgetTooSmall(budget, held, self.bound, measured_on, most, hint, name)

    @property
    def bound(self) -> int:
        """The peak in the model that no plan can be below, of all examples."""
        return self.examples * lowest_peak_bound(self.whole)

    @functools.cached_property
    def lowest_peak(self) -> int:
        """The lowest budget that there is a plan for, in the model."""
        return min(variant.planner.lowest_peak() for variant in self.variants())

    def flops_bound(self, budget: int, flops: int) -> int:
        """What no plan within a budget is below; `flops` is what one of them needs."""
        return min(flops, flops_bound(self.whole, budget)) if flops else 0
