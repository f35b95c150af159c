"""A plan: the values that a program keeps and recomputes; printed as text or drawn as a picture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tracegrad._jax.packages import require
from tracegrad.ir import Graph, folding
from tracegrad.ir.wording import in_units, table
from tracegrad.planning.regions import nodes_of
from tracegrad.planning.simulation import Segment, Simulation
from tracegrad.tracing import to_callable

if TYPE_CHECKING:
    from tracegrad.planning.search import Search


@dataclass(frozen=True)
class RecomputePlan:
    """The values that a program keeps, the values that it recomputes, and the cost; from
    `plan_recompute`.

    Sizes are bytes that are alive at once in the gradient, without arguments and results. The sizes
    of the planner's model count activations, cotangents and unfinished gradients; they estimate the
    bytes that XLA holds on any backend. XLA reports `held` for the compiled gradient.

    Attributes:
      graph: the planned program, in which jitted calls are inlined.
      budget: the memory budget in bytes.
      held: bytes that XLA holds with the plan, within the budget; None if nothing was measured.
      held_without: bytes that XLA holds with nothing recomputed.
      measured_on: the backend and the JAX version that compiled the gradient or, if nothing was
        measured, the reason.
      peak, peak_without: the peak in the model, with the plan and with nothing recomputed.
      residual, residual_without: bytes kept from the forward to the backward pass, in the model,
        with the plan and with nothing recomputed.
      flops: the FLOPs of recomputation.
      forward_flops: the FLOPs of the forward pass.
      target: the peak in the model that the planner aimed at, in bytes.
      segments: the parts of the program, in order. A segment is kept, or recomputed except for the
        values that it saves.
    """

    _search: Search = field(repr=False, compare=False)
    _simulation: Simulation = field(repr=False, compare=False)
    segments: tuple[Segment, ...]
    target: int
    budget: int
    held: int | None = None
    held_without: int | None = None
    measured_on: str = ""
    graph: Graph = field(init=False, compare=False)
    peak: int = field(init=False)
    peak_without: int = field(init=False)
    residual: int = field(init=False)
    residual_without: int = field(init=False)
    flops: int = field(init=False)
    forward_flops: int = field(init=False)

    def __post_init__(self) -> None:
        whole, kept, found = self._search.whole, self._search.kept, self._simulation
        vars(self).update(peak_without=kept.peak, residual_without=kept.residual)
        vars(self).update(peak=found.peak, residual=found.residual, flops=found.flops)
        vars(self).update(graph=whole.graph, forward_flops=whole.total_flops)

    @functools.cached_property
    def scans(self) -> str:
        """Describes how the bodies of scans run; "" if they run unchanged."""
        whole = self._search.whole
        ways = ((s, whole.steps[s.step].scans) for s in self.segments)
        names = [w[n].name for s, w in ways for n in whole.nodes[s.start : s.stop] if n in w]
        return "; ".join(dict.fromkeys(names))

    @property
    def is_needed(self) -> bool:
        """Whether the plan recomputes anything."""
        return any(segment.recompute or segment.step for segment in self.segments)

    def rewritten(self) -> Graph:
        """Returns the program with a `Recompute` node for every recomputed segment. Plans with
        equal segments share the program, so that JAX differentiates the regions of a measured plan
        once."""
        return self._search.rewritten(self.segments)

    def apply(self) -> Callable[..., Any]:
        """Returns the planned function, with the arguments and results of the original function.

        Differentiate it, and compile the gradient with `tracegrad.trace`, which makes sure that
        XLA recomputes, or with `jax.jit`. The function takes arguments of the planned types only,
        and raises TypeError for others.
        """
        return to_callable(self.rewritten())

    def __str__(self) -> str:
        peak, without = in_units(self.peak), in_units(self.peak_without)
        kept, kept_without = in_units(self.residual), in_units(self.residual_without)
        share = _percent(self.flops, self.forward_flops)
        lines = [f"recompute plan of {self.graph.name} for a budget of {in_units(self.budget)}"]
        if self.held is None:
            lines.append(f"  measured     not: {self.measured_on}")
        else:
            of = f" of {in_units(self.held_without)}" if self.held_without else ""
            lines.append(f"  XLA holds    {in_units(self.held)}{of} ({self.measured_on})")
        lines += [
            f"  peak         {peak} of {without} ({_percent(self.peak, self.peak_without)}) in the "
            "model",
            f"  residuals    {kept} of {kept_without} "
            f"({_percent(self.residual, self.residual_without)})",
            f"  extra FLOPs  {self.flops:.4g}, {share} of the forward pass",
        ]
        if self.scans:
            lines.append(f"  scans        {self.scans}")
        rows = [("segment", "nodes", "what", "saved", "peak", "extra FLOPs", "begins with")]
        found = self._simulation
        for segment, local, most in zip(self.segments, found.locals, found.peaks, strict=True):
            nodes = nodes_of(self._search.whole, segment.start, segment.stop)
            what = "recompute" if segment.recompute else "keep"
            counts = str(len(rows) - 1), str(len(nodes)), what, str(len(local.stored))
            costs = in_units(most), _percent(local.flops, self.forward_flops)
            rows.append((*counts, *costs, nodes[0].name if nodes else ""))
        lines += [f"  {line}" for line in table(rows)]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return folding.of_text(str(self))

    def timeline(self) -> tuple[list[int], list[int]]:
        """Returns the bytes alive at each operation of the forward pass and then of the backward
        pass: a list with everything kept, and a list with the plan."""
        before, after = self._search.kept, self._simulation
        return [*before.forward, *before.backward], [*after.forward, *after.backward]

    def plot(self) -> Any:
        """Draws the bytes alive over the forward and the backward pass, with and without the plan.

        Returns a matplotlib Figure.

        Raises ImportError without matplotlib.
        """
        missing = "drawing a plan needs matplotlib: pip install matplotlib"
        figures = require("matplotlib.figure", missing)
        figure = figures.Figure(figsize=(6, 4), layout="constrained")
        axis = figure.subplots()
        for label, sizes in zip(("everything kept", "planned"), self.timeline(), strict=True):
            # The forward pass takes the first half of the axis, whatever its number of operations.
            axis.plot(np.linspace(0, 1, len(sizes)), np.divide(sizes, 2**20), label=label)
        axis.axhline(self.target / 2**20, linestyle=":", color="grey", label="planned for")
        axis.axvline(0.5, linewidth=0.5, color="grey")
        along = "operations: the forward pass, then the backward pass"
        axis.set(title="memory of one gradient", xlabel=along, ylabel="MiB alive", xticks=[])
        axis.legend()
        return figure


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0%"
