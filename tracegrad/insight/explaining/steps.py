"""Finds where the norm of the gradient vanishes or explodes along the steps of a scan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tracegrad import _jax
from tracegrad.insight.explaining.observed import Observed, Place
from tracegrad.insight.explaining.slopes import (
    CURES,
    Slope,
    changes_by_line,
)
from tracegrad.insight.explaining.statistics import NORM, ZEROS
from tracegrad.insight.explaining.streams import Streams, total
from tracegrad.insight.explanation import Finding
from tracegrad.ir import Atom, Graph, Node, Occurrence, Value, has_gradient
from tracegrad.ir.dependence import dependence

_FEWEST_STEPS = 8
_STEP_LIMIT = 1e-8


def slopes_of_steps(observed: Observed, norms: Mapping[str, float]) -> Iterator[Finding]:
    """Returns findings on gradients that vanish or explode along the steps of scans (that are not
    inside another scan); `norms`: the norms of the gradients of the sources. (To measure more is
    expensive in loops, where gradients often vanish.)"""
    largest = max(norms.values(), default=0.0)
    for scan, j, stat in observed.of("carry"):
        if stat.ndim != 2 or not _recurs(scan.node, j):
            continue
        order = slice(None, None, -1 if scan.node.params["reverse"] else 1)
        along = stat[order, NORM][_start(observed, scan, j, stat[:, NORM], order) :]
        if _is_read_at_one_step(observed, scan):
            along = np.trim_zeros(along, "b")
        if len(along) < _FEWEST_STEPS:
            continue
        name = f"carry {j} of the {scan.node.op}"
        slope = Slope(name, tuple(map(float, along)), _STEP_LIMIT)
        # An iteration to a fixed point forgets where it started; its parameters are used last, too.
        converges = slope.cause == "vanishing" and largest > _STEP_LIMIT * slope.norms[-1]
        if slope.cause and not (converges and _starts_alike(observed, scan, j)):
            yield _finding((scan, j), slope, Streams(observed))


def _recurs(scan: Node, j: int) -> bool:
    """Whether a carry of a scan depends on the same carry of some step before."""
    first, count = _jax.scan_split(scan.params)
    read = [mask >> first for mask in dependence(scan.regions["jaxpr"])[:count]]
    after, known = [j], set[int]()
    while after:
        i = after.pop()
        new = {k for k, mask in enumerate(read) if mask >> i & 1} - known
        known |= new
        after += new
    return j in known


def _start(
    observed: Observed, scan: Occurrence, j: int, norms: np.ndarray[Any, Any], order: slice
) -> int:
    """Returns the place, in some order of the steps, at which the norms of a carry's cotangents
    start to tell something: past the step whose carry is masked (an episode that starts anew), and
    before which they all are zero."""
    given = np.flatnonzero(norms[order])
    if not len(given) or not given[0]:
        return 0
    step = int(np.arange(len(norms))[order][given[0]])
    first, _ = _jax.scan_split(scan.node.params)
    carry = scan.node.regions["jaxpr"].inputs[first + j]
    uses = Streams(observed).uses(scan.into("jaxpr"), carry)
    used = [here for _, here in uses if observed.arrives(Place(here, (step,)))]
    is_masked = used and all(here.node.op in ("select_n", "mul") for here in used)
    return int(given[0]) if is_masked else 0


def _is_read_at_one_step(observed: Observed, scan: Occurrence) -> bool:
    """Whether a scan gets its cotangent at one step of its stacked results (`hs[-1]`). If it gets
    some at many steps, their sizes differ for other reasons than the recurrence."""
    _, count = _jax.scan_split(scan.node.params)
    given = observed.of_results("ct", Place(scan))
    steps = [(1 - ct[ZEROS]) * scan.node.params["length"] for ct in given[count:] if ct is not None]
    return all(many < 1.5 for many in steps)


def _starts_alike(observed: Observed, scan: Occurrence, j: int) -> bool:
    """Whether every call of a scan starts a carry with the same constant, and each step gets the
    same."""
    first, count = _jax.scan_split(scan.node.params)
    same = not any(map(has_gradient, scan.node.inputs[first + count :]))
    return same and _is_constant(observed.region(scan.path), scan.node.inputs[first + j])


def _is_constant(region: Graph, value: Atom) -> bool:
    """Whether a value is computed from numbers in the program alone."""
    if not isinstance(value, Value):
        return True
    node = region.producers.get(value)
    if node is None:
        return value in region.constants
    return not node.regions and all(_is_constant(region, v) for v in node.inputs)


def _finding(carry: tuple[Occurrence, int], slope: Slope, streams: Streams) -> Finding:
    """Returns the finding on a carry of a scan whose cotangent vanishes or explodes."""
    scan, j = carry
    body, path = scan.node.regions["jaxpr"], scan.into("jaxpr")
    first, _ = _jax.scan_split(scan.node.params)
    given = total(np.array(slope.norms[:-1]))  # by each step to the step before
    links = streams.to(body.inputs[first + j], given, path)
    found, most = scan, ""
    if links:
        by_line = changes_by_line(links, slope.sign).values()
        worst = max(by_line, key=lambda changes: sum(change for change, _ in changes))
        found = max(worst, key=lambda each: each[0])[1].occurrence
        most = f", most of it in {found.node.name}"
    words = f"{slope.words} steps{most}"
    return Finding.of(found, slope.cause, words, (slope.name,), cure=CURES[slope.cause])
