"""A scan that keeps less of its body: planned from inside, in turn one way and another, or grouped.

What a scan keeps for its backward pass is kept once for each iteration. So its body is recomputed
whole, but for a save set, in every iteration or in some of them; and beyond that the iterations go
in groups of which only the first carry is kept, each group being run again when its turn comes.
All of that for each way to run the scans that are inside the body.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.pull_back import active_inputs
from tracegrad.ir import Graph, Node
from tracegrad.ir.running import run_graph
from tracegrad.planning.activity import active_in_body
from tracegrad.planning.costs import nbytes
from tracegrad.planning.cuts import hulls
from tracegrad.planning.flatten import flatten
from tracegrad.planning.model import MemoryModel, ScanWay
from tracegrad.planning.modelling import cotangents_around, handed_bytes, model
from tracegrad.planning.planner import frontier, network_of, recomputing
from tracegrad.planning.regions import with_regions
from tracegrad.planning.residuals import residuals_of
from tracegrad.planning.scan_groups import group_size, in_groups, in_turn, part_of
from tracegrad.planning.simulation import Local, Piece, Segment
from tracegrad.planning.tuning import TUNING
from tracegrad.tracing.graphs import graph as trace_graph


def in_steps(whole: MemoryModel, times: int = 1) -> MemoryModel:
    """Gives a model its `steps`, in which the scans that keep something beside their operands and
    results run ever more again to keep ever less; `times`: how often the program is run, in scans
    around."""
    assert whole.graph is not None
    if len(whole.steps) > 1:
        return whole
    scans = [
        node
        for node, extra in zip(whole.nodes, whole.extra, strict=True)
        if node.primitive is _jax.SCAN and extra and not node.effects
        if isinstance(length := node.params["length"], int) and length > 1
    ]
    found = {node: _ways(node, whole, times * len(scans)) for node in scans}
    known: Any = {"active": whole.active, "residuals": whole.residuals}
    in_step = functools.partial(model, whole.graph, whole.fusion, **known)
    for k in range(max(map(len, found.values()), default=0)):
        chosen = {node: ways[min(k, len(ways) - 1)] for node, ways in found.items()}
        whole.steps.append(in_step(scans=chosen))
    return whole


def _ways(scan: Node, around: MemoryModel, count: int) -> list[ScanWay]:
    """Those that no other spares both bytes and FLOPs to, if so many such scans are run: the
    backward pass of one works while the others still keep what they do."""
    found = list(_options(scan, around))
    flops = np.array([option.flops for option in found], float)
    size = np.array([count * option.kept + option.working for option in found], float)
    best = [found[k] for k in frontier(flops, size, TUNING.scan_options)]
    active = active_inputs(scan, around.active)
    ways = []
    for option in best:
        program = option.made()
        read = residuals_of(functools.partial(run_graph, program), program.in_avals, active)
        ways.append(ScanWay(program, read, option.working, option.flops, option.name))
    return ways


class _Option(NamedTuple):
    """A way to run a scan: what makes the program, the FLOPs that it runs again in all, and about
    how many bytes it keeps for its backward pass and needs for that beside them."""

    made: Callable[[], Graph]
    flops: int
    kept: int
    working: int
    name: str


def _options(scan: Node, around: MemoryModel) -> Iterator[_Option]:
    """With less kept in the scans inside its body, with each iteration recomputed but for a save
    set, some iterations one way and some another, and in groups."""
    length = scan.params["length"]
    constants, carried = _jax.scan_split(scan.params)

    def modelled(graph: Graph) -> MemoryModel:
        active = active_in_body(scan, graph, around.active)
        return model(graph, active=active, residuals=around.residuals)

    given = [v.aval for v in scan.inputs]
    body = in_steps(modelled(flatten(scan.regions["jaxpr"])), length)
    assert body.graph is not None

    def put(ways: Sequence[Segment], size: int = 1) -> Graph:
        """The scan with its body run in these ways, in turn, or in groups of a size."""
        first, *others = ways
        if others:
            inside = with_regions(body, [Segment(0, len(body), step=first.step)])
            bodies = []
            for k, way in enumerate(ways):
                part = modelled(flatten(part_of(scan, inside, k, len(ways))))
                assert len(part) == len(body), "what is around is views"
                bodies.append(with_regions(part, [replace(way, step=0)]))
            run = in_turn(scan, bodies)
        else:
            run = in_groups(scan, with_regions(body, [first]), size)
        return flatten(trace_graph(run, *given))

    carry = sum(nbytes(v.aval) for v in body.graph.inputs[constants : constants + carried])
    handed, around_it = handed_bytes(scan), cotangents_around(scan, body.graph, around.active)
    types = body.graph.in_avals
    is_on_one = all(_jax.local_shape(t) == t.shape and not _jax.varying_axes(t) for t in types)
    for step, inside in enumerate(body.steps):
        names = dict.fromkeys(way.name for way in inside.scans.values())
        deeper = f"; inside these, {'; '.join(names)}" if names else ""
        piece = Piece(inside, 0, len(body))
        (cuts,) = hulls([network_of(piece)], TUNING.save_sets)
        ways = [Segment(0, len(body)), *recomputing(piece, cuts)]
        runs = [(way, piece.run(way)) for way in ways]
        for turn in _turns(runs, length if is_on_one else 1):
            first, _ = turn[0]
            if not (step or first.recompute):
                continue  # the scan as it is
            times = length // len(turn)
            kept = [local.staying + carry for _, local in turn]
            flops = sum(local.flops for _, local in turn)
            working = max(max(local.backward) for _, local in turn) + sum(kept[1:])
            yield _Option(
                functools.partial(put, [replace(way, step=step) for way, _ in turn]),
                times * flops,
                times * sum(kept),
                max(0, working - around_it) + len(turn) * handed,
                f"{_told([way for way, _ in turn])}{deeper}",
            )
        if (size := group_size(length)) > 1:
            again = Segment(0, len(body), recompute=True, step=step)
            local = piece.run(again)
            yield _Option(
                functools.partial(put, [again], size),
                length * (body.total_flops + local.flops),
                length // size * carry,
                max(0, max(local.backward) - around_it) + handed + size * (carry + handed),
                f"scan bodies recomputed, in groups of {size}{deeper}",
            )


def _turns(
    runs: Sequence[tuple[Segment, Local]], length: int
) -> Iterator[list[tuple[Segment, Local]]]:
    """Each way for all iterations, and of each two that are next to each other some of the one and
    some of the other: what is kept comes in steps of a whole body otherwise."""
    yield from ([run] for run in runs)
    here = [run for run in runs if run[0].recompute]
    for (more, less), count in itertools.product(itertools.pairwise(here), TUNING.in_turn):
        for part in range(1, count) if length % count == 0 else ():
            if math.gcd(part, count) == 1:
                yield [more] * part + [less] * (count - part)


def _told(turn: Sequence[Segment]) -> str:
    counts = Counter(
        f"recomputed but for {len(way.saved)} values" if way.recompute else "kept" for way in turn
    )
    if len(counts) == 1:
        return f"scan bodies {next(iter(counts))}"
    return f"of {len(turn)} scan bodies " + ", ".join(f"{n} {name}" for name, n in counts.items())
