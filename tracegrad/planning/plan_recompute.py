"""Plans the recomputation of a program to fit a memory budget: `plan_recompute` returns a plan, and
`recompute_to_fit` returns a rule that rewrites graphs before they are compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tracegrad import _jax
from tracegrad._jax.caches import cached
from tracegrad._jax.progress import progress
from tracegrad.differentiation.wrt import Wrt, partition
from tracegrad.ir import Graph
from tracegrad.ir.notes import add_note
from tracegrad.ir.occurrence import is_under_rules
from tracegrad.ir.wording import in_units
from tracegrad.planning.compiled import NotMeasuredError
from tracegrad.planning.fitting import fitted
from tracegrad.planning.flatten import flatten
from tracegrad.planning.measuring import MeasuredGradient, shardings_of
from tracegrad.planning.modelling import model
from tracegrad.planning.options import Measure, MemoryBudget, budget_bytes, plans_to_compile
from tracegrad.planning.plan import RecomputePlan
from tracegrad.planning.search import BudgetTooSmall, Search
from tracegrad.planning.whole_step import warn_if_step_exceeds_budget
from tracegrad.rewriting.matches import refuse_differentiated
from tracegrad.tracing.graphs import graph_of_call, require_function
from tracegrad.tracing.tools import tool


@tool
def plan_recompute(
    fun: Callable[..., Any],
    /,
    *args: Any,
    memory_budget: MemoryBudget,
    wrt: Wrt | None = None,
    measure: Measure = True,
    **kwargs: Any,
) -> RecomputePlan:
    """Plans the recomputation in a function's backward pass, so that memory stays within a budget.

    The gradient of ``fun`` keeps values for the backward pass. The plan recomputes some of these
    values, so that the memory that XLA needs at once for the gradient, without arguments and
    results, is within the budget, and the extra FLOPs are the fewest. A model of residuals and live
    ranges makes the plan. Then the gradient is compiled, and the bytes that XLA reports correct the
    plan. On a mesh, bytes are for one device.

    Args:
      fun: a function of arrays and pytrees of arrays, differentiable with respect to its float
        arguments. Parts under `jax.checkpoint` are not changed.
      *args, **kwargs: the arguments of `fun`: arrays, or `jax.ShapeDtypeStruct`s.
      memory_budget: bytes as an int or a string (``"2GiB"``), or a share of the memory without
        recomputation as a float (``0.3``) or a string (``"30%"``).
      wrt: the arguments to differentiate with respect to, as in `tracegrad.grad`; the default is
        all float arguments. The gradient with respect to other arguments
        may hold more or less than the plan says.
      measure: the maximum number of plans to compile, besides the program with nothing recomputed;
        True means two. The bytes of similar plans differ by some per cent in XLA. So a further
        plan, halfway between a plan that was too large and a plan that was not, may need fewer
        FLOPs. A plan that would save little (less than a hundredth of the forward pass, or a
        thirtieth of the recomputation) is not compiled. False plans by the model alone, without
        compiling: XLA may then hold more or less, and the plan says that it was not measured.

    Returns:
      A `RecomputePlan`; `fun` is not run. Equal arguments give equal plans. The plan is for the
      devices of the arguments. These devices need not exist here: a `jax.ShapeDtypeStruct` may have
      the ``sharding`` of a device of `jax.experimental.topologies`. A program that cannot be
      compiled by itself, for example with symbolic sizes, is planned by the model, and the plan
      says why.

    Raises:
      TypeError, ValueError: `memory_budget`, `measure` or `wrt` (see `tracegrad.grad`) is not
        valid, or the program has no gradient.
      BudgetTooSmall: no plan is within the budget. The error has the lowest peak of the tried
        plans.

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

    On a CPU, XLA allocates the stacked results of loops when the program begins, so memory may not
    fall if one of several scans is recomputed. It falls if the program is compiled with
    ``trace(..., compiler_options={
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"})``.

    The cheapest save sets are minimum cuts, as in PyTorch's min-cut partitioner; segments go back
    to Chen et al. 2016 (arXiv:1604.06174).
    """
    require_function(fun, "plan for")
    asked = recompute_to_fit(memory_budget, measure=measure)
    graph = graph_of_call(fun, args, kwargs)
    if wrt is not None:
        counted_inputs = partition(fun, wrt, args, kwargs).counted_inputs
        graph = replace(graph, differentiated=counted_inputs)
    return asked.plan(graph, shardings_of(graph, args, kwargs))


def recompute_to_fit(memory_budget: MemoryBudget, *, measure: Measure = True) -> FitToBudget:
    """Returns a rule that rewrites a graph, so that its gradient fits a memory budget.

    Args:
      memory_budget, measure: as for `plan_recompute`.

    Returns:
      A function ``Graph -> Graph``. A graph that fits is returned unchanged, and so is a step whose
      loss the rule has already rewritten when `tracegrad.grad` differentiated the loss. In any
      other graph, equal element-wise operations and reductions are merged. So put rules that edit
      gradients before this one, as `trace` does with ``memory_budget=``.

    Raises:
      TypeError, ValueError: `memory_budget` or `measure` is not valid, as in `plan_recompute`.
      ValueError: the budget is in bytes, the mesh has automatic axes, so that XLA decides what a
        device holds, and all devices together hold more than the budget.
      GraphError: the rule is applied to a program that contains a gradient made by JAX. There,
        recomputation would save nothing.
    """
    budget_bytes(memory_budget, 1 << 40)  # raises if the budget is not valid
    return _rule(memory_budget, plans_to_compile(measure))


@dataclass(frozen=True, eq=False)
class FitToBudget:
    """The rule of `recompute_to_fit`, which compiles at most `plans` plans."""

    memory_budget: MemoryBudget
    plans: int

    for_the_outermost = True

    def __repr__(self) -> str:
        return f"memory_budget={self.memory_budget!r}"

    def __call__(self, graph: Graph) -> Graph:
        # A graph that contains the gradient of a loss is a train step, unless it is differentiated.
        places = [] if graph.differentiated else list(graph.walk())
        if any(map(is_under_rules, places)):
            if not self._is_share:
                warn_if_step_exceeds_budget(
                    graph, places, budget_bytes(self.memory_budget, 0), self
                )
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
                f"{self!r} is bytes of one device, but all devices together hold more for the "
                f"gradient of {graph.name}, and on a mesh with automatic axes XLA decides only "
                "after planning what each device holds. Give a share, as '50%'; use a mesh with "
                "explicit axes; or call plan_recompute(loss, *args, memory_budget=...) with "
                "sharded arguments"
            )
        assert plan is not None
        return plan.rewritten() if plan.is_needed else graph

    @property
    def _is_share(self) -> bool:
        return budget_bytes(self.memory_budget, 1 << 40) != budget_bytes(self.memory_budget, 1)

    def plan(
        self, graph: Graph, shardings: Sequence[Any] | None = None, examples: int = 1
    ) -> RecomputePlan:
        """Plans a graph, as `plan_recompute` plans a function. The enclosing `jax.vmap`s compute
        `examples` examples together, and the budget is for all of them."""
        with progress("plan_recompute", 1 + self.plans) as begin:
            program, why_not = flatten(graph), "measure=False"
            if self.plans:
                try:
                    begin("compiling with nothing recomputed")
                    gradient = MeasuredGradient(program, shardings, examples)
                    return self._measure_plans(program, gradient, examples, begin)
                except NotMeasuredError as error:
                    why_not = str(error)
            search = Search(model(program), examples)
            budget = budget_bytes(self.memory_budget, search.kept.peak * examples) // examples
            try:
                return replace(search.best(budget), measured_on=why_not)
            except BudgetTooSmall as error:
                add_note(error, f"Bytes are the model's (symbolic sizes count as 1): {why_not}")
                raise

    def _measure_plans(
        self,
        program: Graph,
        gradient: MeasuredGradient,
        examples: int,
        begin: Callable[[str], None],
    ) -> RecomputePlan:
        without, fusion = gradient.held_and_fusion(program)
        budget, numbers = budget_bytes(self.memory_budget, without), itertools.count(1)

        def held_by(planned: Graph) -> int:
            which = f"plan {next(numbers)} of at most {self.plans}"
            begin(f"compiling {which}, budget {in_units(budget)}")
            return gradient.held(planned)

        search = Search(model(program, fusion), examples)
        return fitted(search, budget, held_by, without, self.plans, gradient.measured_on)


# Cached, since functions that are traced with the same rule share their programs. The cache tells
# the budget 1 (a byte) from 1.0 (the whole peak).
_rule = cached(512)(FitToBudget)
