"""`load_plan`: a plan that was written to a file → the plan of the function it was made for."""

from __future__ import annotations

import functools
import json
import math
import os
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tracegrad import _jax
from tracegrad.planning.budget import in_units
from tracegrad.planning.fingerprint import fingerprint
from tracegrad.planning.flatten import flatten
from tracegrad.planning.fusion import Fusion, read_from
from tracegrad.planning.measuring import Gradient, NotMeasuredError, shardings_of
from tracegrad.planning.modelling import model
from tracegrad.planning.plan import FORMAT, VERSION, RecomputePlan
from tracegrad.planning.plan_recompute import plan_of
from tracegrad.planning.search import Fit, Search
from tracegrad.planning.simulation import Segment, simulate
from tracegrad.tracing.graphs import graph as trace_graph

_AGAIN = "Plan again, and save that: plan_recompute(fun, memory_budget)(*args).save(path)"


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
      OSError: the file cannot be read.
      ValueError: the file is no plan, or not a whole one, or of another program (when called with
        arguments): one with other operations, parameters of them, custom gradients or types. Other
        values of what it closes over are no other program. Or XLA holds more than the budget where
        it is measured again.
    """
    data = _read(path)
    segments = [_segment(path, k, entry) for k, entry in enumerate(data["segments"])]
    if data["transfer"] is None and any(segment.offload for segment in segments):
        raise ValueError(f"{path}: no 'transfer' says what it costs to offload. {_AGAIN}")

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
        fusion = _fusion(path, data["fusion"], len(flat.nodes))
        search = Search(model(flat, fusion, transfer=math.inf if transfer is None else transfer))
        number = data["scan_variant"]
        variant = next((each for each in search.variants() if each.number == number), None)
        if variant is None:
            raise ValueError(f"the program of {path} has no variant {number!r} of its scans")
        if data["scans"] != variant.name:
            raise ValueError(
                f"{path} was planned by another version of this package, which runs scans in other "
                f"ways: {data['scans']!r} was what is {variant.name!r} now. Plan again"
            )
        planned = variant.model
        ends = [0, *(segment.stop for segment in segments)]
        if [s.start for s in segments] != ends[:-1] or ends[-1] != len(planned):
            raise ValueError(f"{path}: the segments do not cover the program's operations in order")
        if any(s.recompute and any(planned.fixed[s.start : s.stop]) for s in segments):
            raise ValueError(f"{path}: an operation with effects would happen twice. {_AGAIN}")
        simulation = simulate(planned, segments)
        fit = Fit(variant, tuple(segments), simulation, data["target"], data["held"])
        budget, without, measured_on = data["budget"], data["held_without"], data["measured_on"]
        if fit.held is not None and measured_on != _jax.compiled_by():
            gradient = Gradient(flat, search.whole.active, shardings_of(graph, args, kwargs))
            without, measured_on = None, _jax.compiled_by()
            try:
                fit = replace(fit, held=gradient.held(fit.rewritten()))
            except NotMeasuredError as error:
                fit, measured_on = replace(fit, held=None), str(error)
            if fit.held is not None and fit.held > budget:
                raise ValueError(
                    f"{path} was planned for {in_units(budget)}, of which XLA holds "
                    f"{in_units(fit.held)} here ({measured_on}). Plan again"
                )
        return plan_of(search, fit, budget, without, measured_on)

    return load


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """What the file of a plan says."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a recompute plan: {error}. {_AGAIN}") from error
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError(f"{path} is not a recompute plan (no {FORMAT!r} in it). {_AGAIN}")
    if data.get("version") != VERSION:
        raise ValueError(
            f"{path} is a recompute plan of version {data.get('version')!r}; this package reads "
            f"version {VERSION}. {_AGAIN}"
        )
    beside = {"program": str, "name": str, "transfer": int | float | None}
    beside |= {"fusion": list | None, "scan_variant": int}
    return _with_all(path, "the plan", data, _types(RecomputePlan) | beside)


def _fusion(path: str | os.PathLike[str], data: Any, nodes: int) -> Fusion | None:
    try:
        return None if data is None else read_from(data, nodes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: 'fusion' is that of no program: {error}. {_AGAIN}") from error


def _segment(path: str | os.PathLike[str], number: int, entry: Any) -> Segment:
    name = f"segment {number}"
    data = _with_all(path, name, entry, _types(Segment))
    start, stop, is_run, is_sent = (data[k] for k in ("start", "stop", "recompute", "offload"))
    positions = [*data["saved"], *data["inner"]]
    if all(type(v) is int and start <= v < stop for v in positions):
        segment = Segment(
            start, stop, is_run, frozenset(data["saved"]), tuple(data["inner"]), is_sent
        )
        is_possible = is_run if is_sent or segment.inner else True
        in_order = all(first < last for first, last in segment.pieces)
        if in_order and is_possible and not (is_sent and segment.inner):
            return segment
    raise ValueError(f"{path}: {name} is not one of a recompute plan: {dict(entry)}. {_AGAIN}")


def _types(record: type) -> dict[str, Any]:
    """What stands in a file for the fields of a record by which it is compared."""
    hints = typing.get_type_hints(record)
    kept = {field.name: hints[field.name] for field in fields(record) if field.compare}
    is_list = {name: typing.get_origin(kind) in (tuple, frozenset) for name, kind in kept.items()}
    return {name: list if is_list[name] else kind for name, kind in kept.items()}


def _with_all(
    path: str | os.PathLike[str], name: str, data: Any, types: Mapping[str, Any]
) -> Mapping[str, Any]:
    """An object of the file, if what stands in it has these types; `name` tells which it is."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{path}: {name} should be an object, and is {data!r}. {_AGAIN}")
    for key, kind in types.items():
        expected = f"{path}: {name} should have {getattr(kind, '__name__', kind)} as {key!r}"
        if key not in data:
            raise ValueError(f"{expected}, and has nothing there. {_AGAIN}")
        value = data[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{expected}, and has {value!r}. {_AGAIN}")
    return data
