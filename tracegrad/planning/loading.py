"""`load_plan`: a plan that was written to a file → the plan of the function it was made for."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracegrad import _jax
from tracegrad.planning.budget import in_units
from tracegrad.planning.fingerprint import fingerprint
from tracegrad.planning.flatten import flatten
from tracegrad.planning.measuring import Gradient, NotMeasuredError, shardings_of
from tracegrad.planning.modelling import model
from tracegrad.planning.plan import FORMAT, VERSION, RecomputePlan
from tracegrad.planning.plan_recompute import plan_of
from tracegrad.planning.search import Fit, Search
from tracegrad.planning.simulation import Segment, simulate
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
      backend, or by another JAX, is measured again.

    Raises:
      ValueError: the file is no plan, or of another program (when called with arguments): one with
        other operations, parameters of them, custom gradients or types. Other values of what it
        closes over are no other program. Or XLA holds more than the budget where it is measured
        again.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a recompute plan: {error}") from error
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError(f"{path} is not a recompute plan (no {FORMAT!r} in it)")
    if data.get("version") != VERSION:
        raise ValueError(
            f"{path} is a recompute plan of version {data.get('version')!r}; this package reads "
            f"version {VERSION}. Plan again, and save that: "
            "plan_recompute(fun, memory_budget)(*args).save(path)"
        )

    @functools.wraps(fun, updated=())
    def load(*args: Any, **kwargs: Any) -> RecomputePlan:
        graph = trace_graph(fun)(*args, **kwargs)
        flat = flatten(graph)
        if fingerprint(flat) != data["program"]:
            raise ValueError(
                f"{path} was planned for another program: {data.get('name')} with other "
                "operations, parameters of these, custom gradients or argument shapes, or with "
                "another JAX. Plan again"
            )
        transfer = data["transfer"]
        search = Search(model(flat, transfer=math.inf if transfer is None else transfer))
        number = data["scan_variant"]
        found = [case for case in search.cases() if case.number == number]
        segments = [_segment(entry) for entry in data["segments"]]
        if not found:
            raise ValueError(f"the program of {path} has no variant {number!r} of its scans")
        name = found[0].variant.name
        if data.get("scans", name) != name:
            raise ValueError(
                f"{path} was planned by another version of this package, which runs scans in other "
                f"ways: {data['scans']!r} was what is {name!r} now. Plan again"
            )
        planned = found[0].model
        ends = [0, *(segment.stop for segment in segments)]
        if [s.start for s in segments] != ends[:-1] or ends[-1] != len(planned):
            raise ValueError(f"{path}: the segments do not cover the program's operations in order")
        fit = Fit(
            found[0], tuple(segments), simulate(planned, segments), data["target"], data["held"]
        )
        budget, without, measured_on = data["budget"], data["held_without"], data["measured_on"]
        shardings = shardings_of(graph, args, kwargs)
        if fit.held is not None and measured_on != _jax.compiled_by():
            fit, without, measured_on = _measured_again(path, search, fit, budget, shardings)
        return plan_of(search, fit, budget, without, measured_on)

    return load


def _measured_again(
    path: str | os.PathLike[str], search: Search, fit: Fit, budget: int, shardings: Sequence[Any]
) -> tuple[Fit, None, str]:
    """A plan with what XLA holds here, and where that is."""
    try:
        held = Gradient(search.graph, search.whole.active, shardings).held(fit.rewritten())
    except NotMeasuredError as error:
        return replace(fit, held=None), None, str(error)
    if held > budget:
        raise ValueError(
            f"{path} was planned for {in_units(budget)}, of which XLA holds {in_units(held)} here "
            f"({_jax.compiled_by()}). Plan again"
        )
    return replace(fit, held=held), None, _jax.compiled_by()


def _segment(entry: Mapping[str, Any]) -> Segment:
    start, stop = int(entry["start"]), int(entry["stop"])
    saved = frozenset(int(v) for v in entry["saved"])
    segment = Segment(
        start, stop, bool(entry["recompute"]), saved, tuple(entry["inner"]), bool(entry["offload"])
    )
    in_order = all(first < last for first, last in segment.pieces)
    if not in_order or any(not start <= v < stop for v in saved):
        raise ValueError(f"not a segment of a recompute plan: {dict(entry)}")
    return segment
