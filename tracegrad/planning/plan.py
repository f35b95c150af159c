"""A plan: what a program keeps and what it computes again, as text, as a file and as a picture."""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tracegrad.differentiation.residuals import host_bytes
from tracegrad.ir import Graph
from tracegrad.ir.wording import in_units, table
from tracegrad.planning.fingerprint import fingerprint
from tracegrad.planning.fusion import written_down
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.plan_file import FORMAT, VERSION, PlanRecord, write
from tracegrad.planning.regions import nodes_of
from tracegrad.planning.search import Fit, Search
from tracegrad.planning.simulation import Segment, keep_all
from tracegrad.tracing import to_callable


@dataclass(frozen=True)
class RecomputePlan:
    """What a program keeps, what it computes again, and what that costs; from `plan_recompute`.

    Sizes are bytes that are alive at once in the gradient, beside arguments and results. Those of
    the planner's model are of activations, cotangents and gradients in the making, a portable
    account of what any XLA holds; `held` is what XLA itself says of the compiled gradient.

    Attributes:
      graph: the program that was planned, its jitted calls written out.
      budget: bytes.
      held: what XLA holds with the plan, which is within the budget; None if nothing was measured.
      held_without: the same with nothing recomputed.
      measured_on: the backend and the JAX that compiled it; why not, if nothing was measured.
      peak, peak_without: the highest point in the model, with the plan and with nothing recomputed.
      residual, residual_without: what is kept from the forward to the backward pass, in the model.
      flops: extra FLOPs, and those that could be done while it offloads (see `offloaded`).
      forward_flops: those of the forward pass.
      target: bytes that the plan was made for in the model.
      flops_bound: no plan within the target needs fewer extra FLOPs, in the model.
      peak_bound: no plan has a lower peak, in the model.
      scans: what was done to the bodies of scans; "" for nothing.
      segments: the parts of the program, in order, each kept or recomputed but for a save set.
    """

    graph: Graph = field(compare=False)
    budget: int
    held: int | None
    held_without: int | None
    measured_on: str
    peak: int
    peak_without: int
    residual: int
    residual_without: int
    flops: int
    forward_flops: int
    target: int
    flops_bound: int
    peak_bound: int
    scans: str
    segments: tuple[Segment, ...]
    _fit: Fit = field(repr=False, compare=False)
    _whole: MemoryModel = field(repr=False, compare=False)

    @property
    def is_needed(self) -> bool:
        """Whether anything is recomputed at all."""
        return self._fit.variant.number > 0 or any(segment.recompute for segment in self.segments)

    @functools.cached_property
    def offloaded(self) -> int:
        """Bytes that are kept in the host's memory from the forward to the backward pass."""
        return host_bytes(self.rewritten()) if self._whole.transfer < math.inf else 0

    def rewritten(self) -> Graph:
        """The program with a `Recompute` for every segment that is recomputed."""
        return self._fit.rewritten()

    def apply(self) -> Callable[..., Any]:
        """The planned function: of the same arguments and results as the original.

        Differentiate it and compile that with `tracegrad.trace`, which sees to it that XLA
        recomputes, or with `jax.jit`. It takes arguments of the types that were planned for;
        with others it raises TypeError.
        """
        return to_callable(self.rewritten())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, to be reviewed and kept with the model; see `load_plan`.

        Raises OSError where that cannot be; a file that was there stays then, as it was.
        """
        seen = self._whole.fusion
        fusion, beside = (None, {}) if seen is None else written_down(seen)
        record = PlanRecord(
            format=FORMAT,
            version=VERSION,
            name=self.graph.name,
            program=fingerprint(self.graph),
            summary=tuple(str(self).splitlines()),
            budget=self.budget,
            held=self.held,
            held_without=self.held_without,
            measured_on=self.measured_on,
            differentiated=self.graph.differentiated,
            target=self.target,
            transfer=self._whole.transfer if self._whole.transfer < math.inf else None,
            fusion=fusion,
            beside=beside,
            scans=self.scans,
            scan_variant=self._fit.variant.number,
            segments=self.segments,
        )
        write(record, path)

    def __str__(self) -> str:
        simulation = self._fit.simulation
        share = self.flops / max(1, self.forward_flops)
        bound = self.flops_bound / max(1, self.forward_flops)
        lines = [f"recompute plan of {self.graph.name} for a budget of {in_units(self.budget)}"]
        if self.held is None:
            lines.append(f"  measured     not: {self.measured_on}")
        else:
            of = f" of {in_units(self.held_without)}" if self.held_without else ""
            lines.append(f"  XLA holds    {in_units(self.held)}{of} ({self.measured_on})")
        lines += [
            f"  peak         {in_units(self.peak)} of {in_units(self.peak_without)} "
            f"({_percent(self.peak, self.peak_without)}) in the model; none below "
            f"{in_units(self.peak_bound)} is possible",
            f"  residuals    {in_units(self.residual)} of {in_units(self.residual_without)} "
            f"({_percent(self.residual, self.residual_without)})",
            f"  extra FLOPs  {self.flops:.4g}, {share:.1%} of the forward pass; "
            f"for a peak of {in_units(self.target)} at least {bound:.1%}",
        ]
        if self.offloaded:
            lines.append(
                f"  on the host  {in_units(self.offloaded)}, counted as "
                f"{self._whole.transfer:.4g} FLOPs for a byte"
            )
        if self.scans:
            lines.append(f"  scans        {self.scans}")
        rows = [("segment", "nodes", "what", "saved", "peak", "extra FLOPs", "begins with")]
        for k, (segment, local, peak) in enumerate(
            zip(self.segments, simulation.locals, simulation.peaks, strict=True)
        ):
            nodes = nodes_of(self._fit.variant.model, segment.start, segment.stop)
            rows.append(
                (
                    str(k),
                    str(len(nodes)),
                    _what(segment),
                    str(len(local.stored)),
                    in_units(peak),
                    _percent(local.flops, self.forward_flops),
                    nodes[0].name if nodes else "",
                )
            )
        lines += [f"  {line}" for line in table(rows)]
        return "\n".join(lines)

    __repr__ = __str__

    def timeline(self) -> tuple[list[int], list[int]]:
        """Bytes alive at each operation, of the forward and then of the backward pass: with
        everything kept, and with the plan."""
        before, after = keep_all(self._whole), self._fit.simulation
        return [*before.forward, *before.backward], [*after.forward, *after.backward]

    def curve(self, points: int = 10) -> list[tuple[int, int, int]]:
        """The trade for other budgets: peak bytes, extra FLOPs and their lower bound, from the
        largest peak to the lowest that can be planned. Each point is a plan of its own, and takes
        as long."""
        search = Search(self._whole)
        lowest = search.lowest_peak
        found = [(self.peak_without, 0, 0)]
        for k in range(1, points + 1):
            budget = self.peak_without + (lowest - self.peak_without) * k // points
            fit = search.best(budget)
            bound = search.flops_bound(budget, fit.flops)
            found.append((fit.simulation.peak, fit.flops, bound))
        return found

    def plot(self) -> Any:
        """Two pictures as a matplotlib Figure: bytes alive over the forward and the backward pass
        with and without the plan, and extra FLOPs against the peak for other budgets, above the
        bound that no plan is below.

        Raises ImportError without matplotlib.
        """
        figures = _optional("matplotlib.figure", "drawing a plan needs matplotlib")
        figure = figures.Figure(figsize=(11, 4), layout="constrained")
        memory, trade = figure.subplots(1, 2)
        mib = 2**20
        for label, sizes in zip(("everything kept", "planned"), self.timeline(), strict=True):
            # The forward pass is the first half of either, however many operations it has.
            memory.plot(
                [i / max(1, len(sizes) - 1) for i in range(len(sizes))],
                [size / mib for size in sizes],
                label=label,
            )
        memory.axhline(self.target / mib, linestyle=":", color="grey", label="planned for")
        memory.axvline(0.5, linewidth=0.5, color="grey")
        memory.set(
            title="memory of one gradient",
            xlabel="operations: the forward pass, then the backward pass",
            ylabel="MiB alive",
            xticks=[],
        )
        memory.legend()
        here = (self.peak, self.flops, self.flops_bound)
        points = sorted({*self.curve(), here}, reverse=True)
        forward = max(1, self.forward_flops) / 100
        peaks = [peak / mib for peak, _, _ in points]
        trade.plot(peaks, [flops / forward for _, flops, _ in points], marker="o", label="plans")
        if self.flops_bound:
            bounds = [bound / forward for _, _, bound in points]
            trade.plot(peaks, bounds, linestyle=":", color="grey", label="no plan is below")
        trade.plot([self.peak / mib], [self.flops / forward], "s", label="this plan")
        trade.set(
            title="the trade", xlabel="peak, MiB", ylabel="extra FLOPs, % of the forward pass"
        )
        trade.legend()
        return figure


def _what(segment: Segment) -> str:
    if not segment.recompute:
        return "keep"
    if segment.offload:
        return "recompute, offload"
    return f"recompute, {len(segment.pieces)} pieces" if segment.inner else "recompute"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0%"


def _optional(module: str, why: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.split(".")[0]
        raise ImportError(f"{why}: pip install {name}") from error
