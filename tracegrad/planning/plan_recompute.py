"""What to keep and what to recompute so that a program fits its memory budget: as a plan, which is
`plan_recompute`, and as a rule for graphs that will be compiled, which is `recompute_to_fit`."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tracegrad import _jax
from tracegrad._jax.caches import cached, facts_of
from tracegrad._jax.progress import progress
from tracegrad.differentiation.checks import wrt_or_argnums
from tracegrad.differentiation.wrt import Wrt, partition
from tracegrad.ir import Graph
from tracegrad.ir.engine import engine
from tracegrad.ir.notes import add_note
from tracegrad.ir.occurrence import is_under_rules
from tracegrad.ir.wording import in_units
from tracegrad.planning.compiled import NotMeasuredError
from tracegrad.planning.fitting import fitted
from tracegrad.planning.flatten import flatten
from tracegrad.planning.measuring import Gradient, shardings_of
from tracegrad.planning.modelling import model
from tracegrad.planning.options import (
    Measure,
    MemoryBudget,
    budget_bytes,
    plans_to_compile,
)
from tracegrad.planning.plan import PlanSummary, RecomputePlan, StepPlan
from tracegrad.planning.search import BudgetTooSmall, Search
from tracegrad.planning.whole_step import warn_if_larger
from tracegrad.rewriting.edits import refuse_differentiated
from tracegrad.tracing.graphs import graph_of_call, require_function
from tracegrad.tracing.tools import tool


@tool
def plan_recompute(
    fun: Callable[..., Any],
    /,
    *args: Any,
    memory_budget: MemoryBudget,
    wrt: Wrt | None = None,
    argnums: int | Sequence[int] | None = None,
    measure: Measure = True,
    **kwargs: Any,
) -> RecomputePlan:
    """Plans what the backward pass of a function computes again, so that memory stays in a budget.

    Chooses, of all the values that the gradient of ``fun`` would keep, those to compute again at
    the least extra FLOPs so that what XLA needs at once for the gradient, beside arguments and
    results, is within the budget. Plans are made in a model of residuals and live ranges; the
    gradient is compiled, and what XLA says that it holds corrects what is planned for. On a mesh
    bytes are those of one device.

    Args:
      fun: a function of arrays and pytrees of arrays, differentiable with respect to its float
        arguments. What it recomputes already stays as it is.
      *args, **kwargs: its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
      memory_budget: bytes as an int or a string (``"2GiB"``), or a share of what is held without
        recompute as a float (``0.3``) or a string (``"30%"``).
      wrt, argnums: what the gradient is with respect to, as in `tracegrad.grad` and `jax.grad`;
        without them all float arguments. Other gradients hold more or less than the plan says: one
        of the data is a result, whose bytes XLA has for other things until it is there.
      measure: how many plans are compiled at most, beside the program with nothing recomputed; two
        if True. XLA holds some per cent more or less of a plan than of those beside it, so that a
        third and further ones, each halfway between one that was too large and one that was not,
        may find one of fewer FLOPs. One that would spare little (a hundredth of the forward pass,
        a thirtieth of what is computed again) is not compiled. False to plan by the model alone,
        without compiling. What XLA holds may be more or less then, and the plan says that it was
        not measured.

    Returns:
      A `RecomputePlan`; nothing is computed. Equal arguments give equal plans. It is for the
      devices that arguments lie on, which need not be here: a `jax.ShapeDtypeStruct` may have the
      ``sharding`` of a device of `jax.experimental.topologies`. A program that cannot be compiled
      by itself, such as one of symbolic sizes, is planned by the model, and the plan says why.

    Raises:
      TypeError, ValueError: for a budget or a number of plans that is none, for `wrt` as
        `tracegrad.grad`, for a program without a gradient, and `BudgetTooSmall`, with the least
        that was held, where there is no plan within the budget.

    >>> import jax, jax.numpy as jnp
    >>> def loss(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.sum(x**2)
    >>> weights = [jax.ShapeDtypeStruct((64, 64), "float32")] * 8
    >>> x = jax.ShapeDtypeStruct((1024, 64), "float32")
    >>> plan = plan_recompute(loss, weights, x, memory_budget="75%")
    >>> plan.held <= plan.budget, plan.flops < plan.forward_flops
    (True, True)
    >>> planned = jax.grad(plan.apply())

    On a CPU, XLA makes what loops stack when the program begins, so that memory may not fall where
    one of several scans is recomputed; compiled with ``trace(..., compiler_options={
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"})`` it does.

    The idea of cutting at the cheapest save sets is that of PyTorch's min-cut partitioner; that of
    segments goes back to Chen et al. 2016 (arXiv:1604.06174).
    """
    require_function(fun, "plan for")
    chosen = None if wrt is None and argnums is None else wrt_or_argnums(wrt, argnums)
    asked = recompute_to_fit(memory_budget, measure=measure)
    graph = graph_of_call(fun, args, kwargs)
    if chosen is not None:
        of_inputs = partition(fun, chosen, args, kwargs).of_inputs
        graph = replace(graph, differentiated=of_inputs)
    return asked.plan(graph, shardings_of(graph, args, kwargs))


def recompute_to_fit(memory_budget: MemoryBudget, *, measure: Measure = True) -> FitToBudget:
    """The rule that makes a graph recompute what it must to stay within a memory budget.

    Args:
      memory_budget, measure: as for `plan_recompute`.

    Returns:
      A function ``Graph -> Graph``. A graph that fits is returned as it is, and so is one that
      holds a loss to which the rule was applied where `tracegrad.grad` differentiated it. In any
      other, operations by element and reductions that are computed alike are one: rules that edit
      gradients stand before it, as `trace` has it with ``memory_budget=``.

    Raises:
      TypeError, ValueError: as `plan_recompute`, for a budget or a number of plans that is none.
      ValueError: for bytes on a mesh with automatic axes, where XLA decides what a device holds,
        if all devices together hold more.
      GraphError: when it is applied to a program in which JAX has differentiated something, where
        recompute would save nothing any more.
    """
    budget_bytes(memory_budget, 1 << 40)  # one that is none is refused here
    return _rule(memory_budget, plans_to_compile(measure))


def fit_function_to_budget(memory_budget: MemoryBudget, fun: object = None) -> FitToBudget:
    """`recompute_to_fit` for a function of `trace`: all that trace it with this budget share one
    rule, and what that has planned."""
    shared = recompute_to_fit(memory_budget)
    try:
        known: dict[FitToBudget, FitToBudget] = facts_of(fun).setdefault(FitToBudget, {})
    except TypeError:  # None has no facts, nor has what cannot be held weakly
        return shared
    return known.setdefault(shared, FitToBudget(memory_budget, shared.plans))


class _Planned(threading.local):
    """Plans for gradients of functions that are being traced, each with the traces around it."""

    def __init__(self) -> None:
        self._found: list[tuple[PlanSummary, list[weakref.ref[Any]]]] = []

    def add(self, plan: PlanSummary) -> None:
        around = _jax.outward(_jax.current_trace(None))
        self._found.append((plan, [weakref.ref(trace) for trace in around]))

    def take(self) -> tuple[PlanSummary, ...]:
        """Those of the trace that ends here; others are of traces that have failed."""
        here, found = _jax.current_trace(None), self._found
        self._found = []
        return tuple([plan for plan, around in found if any(ref() is here for ref in around)])


@dataclass(eq=False)
class FitToBudget:
    """What is asked for, and the rule for it; see `plans_to_compile`.

    `latest`: the plan of the function that was traced last.
    """

    memory_budget: MemoryBudget
    plans: int
    latest: StepPlan | None = None
    _planned: _Planned = field(default_factory=_Planned)

    for_the_outermost = True

    def __repr__(self) -> str:
        return f"memory_budget={self.memory_budget!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        return FitToBudget, (self.memory_budget, self.plans)

    def __call__(self, graph: Graph) -> Graph:
        # What holds the gradient of a loss is a train step, unless somebody takes its own gradient.
        places = [] if graph.differentiated else list(graph.walk())
        if any(map(is_under_rules, places)):
            held = None
            if not self._is_share:
                held = warn_if_larger(graph, places, budget_bytes(self.memory_budget, 0), self)
            self.latest = StepPlan(graph.name, self._planned.take(), held)
            return graph
        for place in places:
            refuse_differentiated(place, self, f"tracegrad.trace(loss, {self!r})")
        is_of_all = not self._is_share and any(_jax.is_split_by_xla(v.aval) for v in graph.inputs)
        plan = None
        try:
            plan = self.plan(graph, examples=_jax.examples_at_once())
        except BudgetTooSmall:
            if not is_of_all:
                raise
        if is_of_all and (plan is None or plan.is_needed):
            raise ValueError(
                f"{self!r} is bytes of one device, and all of them together hold more for the "
                f"gradient of {graph.name}, on a mesh with automatic axes: what each holds XLA "
                "decides after planning. Give a share, as '50%'; a mesh with explicit axes; or the "
                "loss to plan_recompute(loss, *args, memory_budget=...), arguments as they lie"
            )
        assert plan is not None
        if graph.differentiated:  # by a step, which this is applied to later
            self._planned.add(plan.summary)
        else:
            self.latest = StepPlan(graph.name, (plan.summary,))
        return plan.rewritten() if plan.is_needed else graph

    @property
    def _is_share(self) -> bool:
        """Whether the budget is a share of what is held without recompute, and no bytes."""
        return budget_bytes(self.memory_budget, 1 << 40) != budget_bytes(self.memory_budget, 1)

    def plan(
        self, graph: Graph, shardings: Sequence[Any] | None = None, examples: int = 1
    ) -> RecomputePlan:
        """`plan_recompute` of a graph; `shardings`: of its inputs, where they are known;
        `examples`: as of `Gradient`, for all of which the budget is."""
        with progress("plan_recompute", 1 + self.plans) as begin:
            program, why_not = flatten(graph), "measure=False"
            if self.plans:
                try:
                    begin("compiling with nothing recomputed")
                    gradient = Gradient(program, shardings, examples)
                    return self._measured(program, gradient, examples, begin)
                except NotMeasuredError as error:
                    why_not = str(error)
            search = Search(model(program), examples)
            budget = budget_bytes(self.memory_budget, search.kept.peak * examples) // examples
            try:
                return replace(search.best(budget), measured_on=why_not)
            except BudgetTooSmall as error:
                add_note(error, f"Bytes are the model's (symbolic sizes count as 1): {why_not}")
                raise

    def _measured(
        self,
        program: Graph,
        gradient: Gradient,
        examples: int,
        begin: Callable[[str], None],
    ) -> RecomputePlan:
        """The plan that XLA was seen to hold within the budget."""
        without, fusion = gradient.held_and_fusion(program)
        budget, numbers = budget_bytes(self.memory_budget, without), itertools.count(1)

        def held_by(planned: Graph) -> int:
            which = f"plan {next(numbers)} of at most {self.plans}"
            begin(f"compiling {which}, budget {in_units(budget)}")
            return gradient.held(planned)

        search = Search(model(program, fusion), examples)
        return fitted(search, budget, held_by, without, self.plans, gradient.measured_on)


# Functions traced with one rule share their programs. Of budgets 1 is a byte, and 1.0 is all.
_rule = cached(512)(FitToBudget)

engine.fit_to_budget = fit_function_to_budget
