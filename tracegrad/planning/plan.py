"""`plan_recompute`: what to keep and what to recompute so that a program fits its memory budget."""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracegrad import _jax
from tracegrad._jax.caches import Cache
from tracegrad.ir import Graph
from tracegrad.ir.engine import engine
from tracegrad.ir.occurrence import is_under_rules
from tracegrad.ir.wording import table
from tracegrad.planning.bounds import lowest_peak_bound
from tracegrad.planning.budget import MemoryBudget, budget_bytes, in_units
from tracegrad.planning.fingerprint import fingerprint
from tracegrad.planning.fitting import Fit, fitted, planned
from tracegrad.planning.flatten import flatten
from tracegrad.planning.measuring import Gradient, NotMeasuredError, shardings_of
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.modelling import model
from tracegrad.planning.regions import nodes_of, with_regions
from tracegrad.planning.search import Progress, Search
from tracegrad.planning.simulation import Segment, keep_all, simulate
from tracegrad.rewriting.edits import refuse_differentiated
from tracegrad.tracing import to_callable
from tracegrad.tracing.graphs import Rule
from tracegrad.tracing.graphs import graph as trace_graph

FORMAT = "tracegrad recompute plan"
VERSION = 3


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
      flops: extra FLOPs. `forward_flops`: those of the forward pass.
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
    _model: MemoryModel = field(repr=False, compare=False)
    _whole: MemoryModel = field(repr=False, compare=False)
    _variant: int = field(repr=False, compare=False)

    @property
    def is_needed(self) -> bool:
        """Whether anything is recomputed at all."""
        return self._variant > 0 or any(segment.recompute for segment in self.segments)

    def rewritten(self) -> Graph:
        """The program with a `Recompute` for every segment that is recomputed."""
        return with_regions(self._model, self.segments)

    def apply(self) -> Callable[..., Any]:
        """The planned function: of the same arguments and results as the original.

        Differentiate it and compile that with `tracegrad.trace`, which sees to it that XLA
        recomputes, or with `jax.jit`. It takes arguments of the types that were planned for;
        with others it raises TypeError.
        """
        return to_callable(self.rewritten())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, to be reviewed and kept with the model; see `load_plan`."""
        Path(path).write_text(json.dumps(self._as_json(), indent=1) + "\n", encoding="utf-8")

    def _as_json(self) -> dict[str, Any]:
        simulation = simulate(self._model, self.segments)
        return {
            "format": FORMAT,
            "version": VERSION,
            "program": fingerprint(self.graph),
            "name": self.graph.name,
            "budget": self.budget,
            "held": self.held,
            "held_without": self.held_without,
            "measured_on": self.measured_on,
            "target": self.target,
            "peak": self.peak,
            "peak_without": self.peak_without,
            "residual": self.residual,
            "extra_flops": self.flops,
            "forward_flops": self.forward_flops,
            "flops_bound": self.flops_bound,
            "scan_variant": self._variant,
            "scans": self.scans,
            "segments": [
                {
                    "start": segment.start,
                    "stop": segment.stop,
                    "recompute": segment.recompute,
                    "saved": sorted(segment.saved),
                    "inner": list(segment.inner),
                    "peak": peak,
                    "extra_flops": local.flops,
                }
                for segment, peak, local in zip(
                    self.segments, simulation.peaks, simulation.locals, strict=True
                )
            ],
        }

    def __str__(self) -> str:
        simulation = simulate(self._model, self.segments)
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
        if self.scans:
            lines.append(f"  scans        {self.scans}")
        rows = [("segment", "nodes", "what", "saved", "peak", "extra FLOPs", "begins with")]
        for k, (segment, local, peak) in enumerate(
            zip(self.segments, simulation.locals, simulation.peaks, strict=True)
        ):
            nodes = nodes_of(self._model, segment.start, segment.stop)
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
        before, after = keep_all(self._whole), simulate(self._model, self.segments)
        return [*before.forward, *before.backward], [*after.forward, *after.backward]

    def curve(self, points: int = 10) -> list[tuple[int, int, int]]:
        """The trade for other budgets: peak bytes, extra FLOPs and their lower bound, from the
        largest peak to the lowest that can be planned. Each point is a plan of its own, and takes
        as long."""
        search = Search(self._whole)
        lowest = search.lowest_peak()
        found = [(self.peak_without, 0, 0)]
        for k in range(1, points + 1):
            budget = self.peak_without + (lowest - self.peak_without) * k // points
            case, _, simulation = search.best(budget)
            flops = simulation.flops + case.variant.flops
            found.append((simulation.peak, flops, search.flops_bound(budget, flops)))
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


def plan_recompute(
    fun: Callable[..., Any], memory_budget: MemoryBudget, *, measure: bool = True
) -> Callable[..., RecomputePlan]:
    """Plans what the backward pass of a function computes again, so that memory stays in a budget.

    Chooses, of all the values that the gradient of ``fun`` would keep, those to compute again at
    the least extra FLOPs so that what XLA needs at once for the gradient, beside arguments and
    results, is within the budget. Plans are made in a model of residuals and live ranges; the
    gradient is compiled, and what XLA says that it holds corrects what is planned for. At most
    three programs are compiled, the first of which recomputes nothing; where none of them is
    within the budget, one of fewer bytes is, too, and at last the plan of the model's lowest peak.
    On a mesh bytes are those of one device.

    Args:
      fun: a function of arrays and pytrees of arrays, differentiable with respect to its float
        arguments. What it recomputes already stays as it is.
      memory_budget: bytes as an int or a string (``"2GiB"``), or a share of what is held without
        recompute as a float (``0.3``) or a string (``"30%"``).
      measure: False to plan by the model alone, without compiling. What XLA holds may be more or
        less then, and the plan says that it was not measured.

    Returns:
      A function that takes the arguments of ``fun`` (arrays or `jax.ShapeDtypeStruct`s) and
      returns a `RecomputePlan`; nothing is computed. Equal arguments give equal plans. A program
      that cannot be compiled by itself, such as one of symbolic sizes, is planned by the model, and
      the plan says why.

    Raises:
      TypeError, ValueError: for a budget that is none (when called: at once), for a program
        without a gradient, and `BudgetTooSmall`, with the least that was held and a bound
        that no plan can be below in the model, where there is no plan within the budget.
      ImportError: without OR-tools (``pip install 'tracegrad[plan]'``).

    >>> import jax, jax.numpy as jnp
    >>> def loss(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.sum(x**2)
    >>> shapes = [jax.ShapeDtypeStruct((64, 64), "float32")] * 8
    >>> plan = plan_recompute(loss, "75%")(shapes, jax.ShapeDtypeStruct((1024, 64), "float32"))
    >>> plan.held <= plan.budget, plan.flops_bound <= plan.flops < plan.forward_flops
    (True, True)
    >>> planned = jax.grad(plan.apply())

    On a CPU, XLA makes what loops stack when the program begins, so that memory may not fall where
    one of several scans is recomputed; compiled with ``trace(..., compiler_options={
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"})`` it does.

    The idea of cutting at the cheapest save sets is that of PyTorch's min-cut partitioner; that of
    segments goes back to Chen et al. 2016 (arXiv:1604.06174).
    """
    if not callable(fun):
        raise TypeError(
            f"expected a function to plan for, got {fun!r} of type {type(fun).__name__}"
        )
    budget_bytes(memory_budget, 1 << 40)  # one that is none is refused here

    @functools.wraps(fun, updated=())
    def plan(*args: Any, **kwargs: Any) -> RecomputePlan:
        graph = trace_graph(fun)(*args, **kwargs)
        shardings = shardings_of(graph, args, kwargs)
        return plan_graph(graph, memory_budget, measure=measure, shardings=shardings)

    return plan


def plan_graph(
    graph: Graph,
    memory_budget: MemoryBudget,
    *,
    measure: bool = True,
    shardings: Sequence[Any] | None = None,
) -> RecomputePlan:
    """`plan_recompute` of a graph; `shardings`: of its inputs, where they are known."""
    flat = flatten(graph)
    bar = Progress()
    search = Search(model(flat), bar)
    try:
        if not measure:
            return _by_the_model(search, memory_budget, "measure=False")
        try:
            return _measured(search, memory_budget, shardings)
        except NotMeasuredError as error:
            return _by_the_model(search, memory_budget, str(error))
    finally:
        bar.close()


def _by_the_model(search: Search, memory_budget: MemoryBudget, why: str) -> RecomputePlan:
    budget = budget_bytes(memory_budget, search.kept.peak)
    return plan_of(search, planned(search, budget), budget, None, why)


def _measured(
    search: Search, memory_budget: MemoryBudget, shardings: Sequence[Any] | None
) -> RecomputePlan:
    """Raises NotMeasuredError where the program cannot be compiled."""
    flat = graph_of(search)
    gradient = Gradient(flat, search.whole.active, shardings)
    without = gradient.held(flat)
    budget = budget_bytes(memory_budget, without)
    if without <= budget:
        fit = replace(planned(search, search.kept.peak), held=without)
    else:
        fit = fitted(search, budget, gradient.held, without)
    return plan_of(search, fit, budget, without, _jax.compiled_by())


def plan_of(
    search: Search, fit: Fit, budget: int, without: int | None, measured_on: str
) -> RecomputePlan:
    whole = search.whole
    return RecomputePlan(
        graph=graph_of(search),
        budget=budget,
        held=fit.held,
        held_without=without,
        measured_on=measured_on,
        peak=fit.simulation.peak,
        peak_without=search.kept.peak,
        residual=fit.simulation.residual,
        residual_without=search.kept.residual,
        flops=fit.flops,
        forward_flops=whole.total_flops,
        target=fit.target,
        flops_bound=search.flops_bound(fit.target, fit.flops),
        peak_bound=lowest_peak_bound(whole),
        scans=fit.case.variant.name,
        segments=fit.segments,
        _model=fit.case.model,
        _whole=whole,
        _variant=fit.case.number,
    )


def graph_of(search: Search) -> Graph:
    assert search.whole.graph is not None
    return search.whole.graph


def recompute_to_fit(memory_budget: MemoryBudget, *, measure: bool = True) -> Rule:
    """The rule that makes a graph recompute what it must to stay within a memory budget.

    Args:
      memory_budget, measure: as for `plan_recompute`.

    Returns:
      A function ``Graph -> Graph``. A graph that fits is returned as it is, and so is one that
      holds a loss to which the rule was applied where `tracegrad.grad` differentiated it.

    Raises:
      TypeError, ValueError: as `plan_recompute`, for a budget that is none.
      GraphError: when it is applied to a program in which JAX has differentiated something, where
        recompute would save nothing any more.
    """
    budget_bytes(memory_budget, 1 << 40)
    key = type(memory_budget), memory_budget, measure  # 1 is a byte, and 1.0 is all
    return _fitting.get(key) or _fitting.put(key, _FitToBudget(memory_budget, measure))


@dataclass(frozen=True, eq=False)
class _FitToBudget:
    memory_budget: MemoryBudget
    measure: bool

    def __call__(self, graph: Graph) -> Graph:
        places = list(graph.walk())
        if any(map(is_under_rules, places)):
            return graph
        for place in places:
            refuse_differentiated(place, self)
        plan = plan_graph(graph, self.memory_budget, measure=self.measure)
        return plan.rewritten() if plan.is_needed else graph

    def __repr__(self) -> str:
        return f"memory_budget={self.memory_budget!r}"


# Of one budget there is one rule, so that functions traced with it again share their programs:
# without it each is planned again, which takes seconds.
_fitting: Cache[Any, _FitToBudget] = Cache(256)


engine.fit_to_budget = recompute_to_fit


def _what(segment: Segment) -> str:
    if not segment.recompute:
        return "keep"
    return f"recompute, {len(segment.pieces)} pieces" if segment.inner else "recompute"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0%"


def _optional(module: str, why: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.split(".")[0]
        raise ImportError(f"{why}: pip install {name}") from error
