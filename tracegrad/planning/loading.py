"""`load_plan`: a plan that was written to a file → the plan of the function it was made for."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tracegrad import _jax
from tracegrad.ir.wording import in_units
from tracegrad.planning.fingerprint import fingerprint
from tracegrad.planning.fusion import read_from
from tracegrad.planning.measuring import Gradient, shardings_of
from tracegrad.planning.modelling import model
from tracegrad.planning.plan import RecomputePlan
from tracegrad.planning.plan_file import AGAIN, read
from tracegrad.planning.plan_recompute import plan_of
from tracegrad.planning.search import Fit, Search
from tracegrad.planning.simulation import Segment, simulate
from tracegrad.rewriting.flatten import flatten
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
    record = read(path)
    segments = record.segments
    for k, segment in enumerate(segments):
        if not _is_possible(segment):
            raise ValueError(f"{path}: segment {k} is none of a recompute plan: {segment}. {AGAIN}")
    if record.transfer is None and any(segment.offload for segment in segments):
        raise ValueError(f"{path}: no 'transfer' says what it costs to offload. {AGAIN}")

    @functools.wraps(fun, updated=())
    def load(*args: Any, **kwargs: Any) -> RecomputePlan:
        graph = trace_graph(fun)(*args, **kwargs)
        graph.differentiated = record.differentiated
        flat = flatten(graph)
        if fingerprint(flat) != record.program:
            raise ValueError(
                f"{path} was planned for another program: {record.name} with other "
                "operations, parameters of these, custom gradients or argument shapes, or with "
                "another JAX. Plan again"
            )
        transfer = math.inf if record.transfer is None else record.transfer
        try:
            seen, count = record.fusion, len(flat.nodes)
            fusion = None if seen is None else read_from(seen, record.beside, count)
        except ValueError as error:
            raise ValueError(f"{path}: {error}. {AGAIN}") from error
        search = Search(model(flat, fusion, transfer=transfer))
        number = record.scan_variant
        variant = next((each for each in search.variants() if each.number == number), None)
        if variant is None:
            raise ValueError(f"the program of {path} has no variant {number!r} of its scans")
        if record.scans != variant.name:
            raise ValueError(
                f"{path} was planned by another version of this package, which runs scans in other "
                f"ways: {record.scans!r} was what is {variant.name!r} now. Plan again"
            )
        planned = variant.model
        ends = [0, *(segment.stop for segment in segments)]
        if [s.start for s in segments] != ends[:-1] or ends[-1] != len(planned):
            raise ValueError(
                f"{path}: the segments do not cover the program's operations in order. {AGAIN}"
            )
        if any(s.recompute and any(planned.fixed[s.start : s.stop]) for s in segments):
            raise ValueError(f"{path}: an operation with effects would happen twice. {AGAIN}")
        simulation = simulate(planned, segments)
        fit = Fit(variant, segments, simulation, record.target, record.held)
        budget, without, measured_on = record.budget, record.held_without, record.measured_on
        shardings = shardings_of(graph, args, kwargs)
        gradient = Gradient(flat, search.whole.active, shardings)
        # How a program lies on several devices is not in the file.
        is_measured = measured_on == gradient.measured_on and _jax.device_count(shardings) == 1
        if fit.held is not None and not is_measured:
            without, measured_on = None, gradient.measured_on
            try:
                fit = replace(fit, held=gradient.held(fit.rewritten()))
            except _jax.NotMeasuredError as error:
                fit, measured_on = replace(fit, held=None), str(error)
            if fit.held is not None and fit.held > budget:
                raise ValueError(
                    f"{path} was planned for {in_units(budget)}, of which XLA holds "
                    f"{in_units(fit.held)} here ({measured_on}). Plan again"
                )
        return plan_of(search, fit, budget, without, measured_on)

    return load


def _is_possible(segment: Segment) -> bool:
    is_within = all(segment.start <= v < segment.stop for v in (*segment.saved, *segment.inner))
    in_order = all(first < last for first, last in segment.pieces)
    is_kept = not (segment.offload or segment.inner or segment.saved)
    is_way = segment.recompute or is_kept
    return is_within and in_order and is_way and not (segment.offload and segment.inner)
