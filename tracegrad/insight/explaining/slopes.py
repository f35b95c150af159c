"""How the norm of the gradient changes along the layers, the steps of a scan and the scopes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracegrad import _jax
from tracegrad.insight.explaining.layers import are_layers
from tracegrad.insight.explaining.observed import Observed, Place, handed_on
from tracegrad.insight.explaining.statistics import NORM
from tracegrad.insight.explaining.visits import is_entered
from tracegrad.insight.explanation import Finding, number_text
from tracegrad.ir import Atom, Occurrence, Value
from tracegrad.ir.occurrence import Path

_FEWEST_LAYERS = 4
_FEWEST_STEPS = 8
_LAYER_LIMIT = 1e-4
_STEP_LIMIT = 1e-8


def slopes(
    observed: Observed, norms: Mapping[str, float], sources: Mapping[str, int | None]
) -> Iterator[Finding]:
    """Gradients that vanish or explode.

    Args:
      norms: of the sources, by their paths.
      sources: by path which input of the graph a source is.
    """
    for slope in (*_layer_slopes(norms), *_step_slopes(observed)):
        first, last = slope.norms[0], slope.norms[-1]
        if not (math.isfinite(first) and math.isfinite(last)) or last == 0:
            continue
        shrinks, grows = first / last < slope.limit, first / last > 1 / slope.limit
        inputs = [i for path in slope.members if (i := sources[path]) is not None]
        if (shrinks or grows) and are_layers(observed.graph, inputs):
            yield _slope_finding(observed, slope, shrinks)


def _slope_finding(observed: Observed, slope: _Slope, shrinks: bool) -> Finding:
    found = _steepest(observed, shrinks) or slope.scan
    what = "shrinks" if shrinks else "grows"
    kind = "steps" if slope.scan is not None else "layers"
    return Finding(
        "vanishing" if shrinks else "exploding",
        f"along {slope.name} the norm {what} from {number_text(slope.norms[-1])} to "
        f"{number_text(slope.norms[0])} over {len(slope.norms)} {kind}"
        + (f", most of it in {found.node.name}" if found is not None else ""),
        (slope.name,),
        origin=None if found is None else found.origin,
        cure="residual connections, normalisation, another activation or initialisation"
        if shrinks
        else "normalisation, a smaller initialisation, clipping by the global norm",
        operation="" if found is None else found.node.name,
    )


@dataclass(frozen=True)
class _Slope:
    """How the norm of the gradient changes along a stack of layers, or the steps of a scan."""

    name: str  # ``layers/*/kernel``, or the scan
    norms: tuple[float, ...]  # from the input's side to the output's
    limit: float  # of the first by the last
    scan: Occurrence | None = None
    members: tuple[str, ...] = ()  # the paths of the layers


def _layer_slopes(norms: Mapping[str, float]) -> list[_Slope]:
    """The norms of leaves whose paths differ in one number, in its order."""
    groups: dict[str, dict[int, str]] = defaultdict(dict)
    for path in norms:
        for match in re.finditer(r"\d+", path):
            pattern = path[: match.start()] + "*" + path[match.end() :]
            groups[pattern][int(match[0])] = path
    found = []
    for pattern, by_number in groups.items():
        if len(by_number) >= _FEWEST_LAYERS:
            members = tuple(path for _, path in sorted(by_number.items()))
            along = tuple(norms[path] for path in members)
            found.append(_Slope(pattern, along, _LAYER_LIMIT, members=members))
    return found


def _step_slopes(observed: Observed) -> list[_Slope]:
    """The norms of the carries of scans (outside of other scans), step by step."""
    found = []
    for scan, j, stat in observed.of("carry"):
        if stat.ndim == 2 and len(stat) >= _FEWEST_STEPS:
            norms = stat[:, NORM]
            if scan.node.params["reverse"]:
                norms = norms[::-1]
            name = f"carry {j} of the {scan.node.op}"
            found.append(_Slope(name, tuple(map(float, norms)), _STEP_LIMIT, scan))
    return found


def _steepest(observed: Observed, shrinking: bool) -> Occurrence | None:
    """A node on the line that shrinks (or grows) cotangents the most, all its runs together."""
    totals: dict[str, float] = defaultdict(float)
    example: dict[str, Occurrence] = {}
    for found, k, stat in observed.of("ct"):
        if k or is_entered(found.node):
            continue
        changes = (_change(observed, found.path, value, stat) for value in found.node.inputs)
        change = [c for c in changes if c is not None]
        origin = found.origin
        if change and origin is not None:
            totals[origin.place] += max(change, key=abs)
            example.setdefault(origin.place, found)
    if not totals:
        return None
    place = (min if shrinking else max)(totals, key=lambda p: totals[p])
    return example[place]


def _change(
    observed: Observed, path: Path, value: Atom, stat: np.ndarray[Any, Any]
) -> float | None:
    """The logarithm of the change of the cotangent's norm from a node's result to its operand."""
    region = observed.region(path)
    while isinstance(value, Value) and value not in region.producers and path:
        enclosing = path[-1][0]
        if enclosing.primitive is _jax.SCAN or len(region.users.get(value, ())) > 1:
            return None
        if value not in region.inputs:
            return None
        path, value = path[:-1], handed_on(enclosing)[region.inputs.index(value)]
        region = observed.region(path)
    if not isinstance(value, Value) or len(region.users.get(value, ())) > 1:
        return None
    producer = region.producers.get(value)
    if producer is None:
        return None
    place = Place(Occurrence(path, producer))
    before = observed.get("ct", place, producer.outputs.index(value))
    if before is None:
        return None
    given, result = _total(stat), _total(before)
    if not (given > 0 and result > 0 and np.isfinite(given) and np.isfinite(result)):
        return None
    return float(np.log(result) - np.log(given))


def _total(stat: np.ndarray[Any, Any]) -> float:
    """The norm of a cotangent over all its runs, without those that did not happen."""
    return float(np.sqrt(np.nansum(np.square(stat[..., NORM], dtype=np.float64))))


def scope_norms(observed: Observed) -> list[tuple[str, float]]:
    """For every named scope, in the order of execution, the norm of the cotangent of its last
    result; over all steps of a scan."""
    found: dict[str, float] = {}
    for last, _, stat in observed.of("ct"):
        scope = "/".join(last.scopes)
        if scope and scope not in found:  # the reverse pass meets the last one first
            found[scope] = _total(stat)
    return list(reversed(found.items()))
