"""`load_plan`: a plan that was written to a file → the plan of the function it was made for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tracegrad import _jax
from tracegrad.differentiation.fingerprint import fingerprint
from tracegrad.ir.wording import in_units
from tracegrad.planning.flatten import flatten
from tracegrad.planning.fusion import Fate
from tracegrad.planning.measuring import Gradient, shardings_of
from tracegrad.planning.modelling import model
from tracegrad.planning.plan import RecomputePlan
from tracegrad.planning.plan_file import AGAIN, read
from tracegrad.planning.search import Search
from tracegrad.planning.simulation import Segment
from tracegrad.tracing.graphs import graph as trace_graph


def load_plan(
    path: str | os.PathLike[str], fun: Callable[..., Any]
) -> Callable[..., RecomputePlan]:
    """A plan that `RecomputePlan.save` wrote, for the function that it was made for.

    Args:
      path: the JSON file.
      fun: the function; it is traced, and nothing is planned anew.

    Returns:
      A function of the arguments of ``fun`` that returns the plan. One that was measured on another
      backend, or by another JAX, is measured again, and so is each for several devices.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is no plan, or not a whole one, or of another program (when called with
        arguments): one with other operations, parameters of them, custom gradients or types. Other
        values of what it closes over are no other program. Or XLA holds more than the budget where
        it is measured again.
    """
    saved = read(path)
    segments = tuple(Segment(**s | {"saved": frozenset(s["saved"])}) for s in saved["segments"])

    @functools.wraps(fun, updated=())
    def load(*args: Any, **kwargs: Any) -> RecomputePlan:
        differentiated = tuple(saved["differentiated"])
        graph = replace(trace_graph(fun)(*args, **kwargs), differentiated=differentiated)
        flat = flatten(graph)
        if fingerprint(flat) != saved["program"]:
            raise ValueError(
                f"{path} was planned for another program: {saved['name']} with other "
                "operations, parameters of these, custom gradients or argument shapes, or with "
                "another JAX. Plan again"
            )
        fusion = None if saved["fusion"] is None else tuple(Fate(*f) for f in saved["fusion"])
        search = Search(model(flat, fusion))
        plan = search.plan(segments, saved["target"])
        if plan.peak != saved["peak"]:
            raise ValueError(f"{path} was planned by another version of tracegrad. {AGAIN}")
        same = "budget", "held", "held_without", "measured_on"
        plan = replace(plan, **{name: saved[name] for name in same})
        shardings = shardings_of(graph, args, kwargs)
        gradient = Gradient(flat, shardings)
        # How a program lies on several devices is not in the file.
        is_here = plan.measured_on == gradient.measured_on and _jax.device_count(shardings) == 1
        if plan.held is None or is_here:
            return plan
        plan = replace(plan, held_without=None, measured_on=gradient.measured_on)
        try:
            plan = replace(plan, held=gradient.held(plan.rewritten()))
        except _jax.NotMeasuredError as error:
            return replace(plan, held=None, measured_on=str(error))
        if plan.held is not None and plan.held > plan.budget:
            raise ValueError(
                f"{path} was planned for {in_units(plan.budget)}, of which XLA holds "
                f"{in_units(plan.held)} here ({plan.measured_on}). Plan again"
            )
        return plan

    return load
