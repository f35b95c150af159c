"""Finds ways to run a scan so that it keeps less for its backward pass.

A scan keeps residuals for each iteration. To keep less, every iteration, or some iterations, keep a
save set and recompute the rest of the body. To keep even less, the iterations are grouped: only the
first carry of a group is kept, and the backward pass recomputes one group at a time. Each of these
ways is combined with each step of the scans inside the body (see `fill_steps`).
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
from tracegrad.planning.cuts import find_hulls
from tracegrad.planning.flatten import flatten
from tracegrad.planning.model import MemoryModel, ScanWay
from tracegrad.planning.modelling import cotangents_around, handed_bytes, model
from tracegrad.planning.planner import frontier, network_of, recomputing
from tracegrad.planning.regions import with_planned_regions
from tracegrad.planning.residuals import residuals_of
from tracegrad.planning.scan_groups import group_size, in_groups, in_turn, part_of
from tracegrad.planning.simulation import Local, Piece, Segment
from tracegrad.planning.tuning import TUNING
from tracegrad.tracing.graphs import graph as trace_graph


def fill_steps(whole: MemoryModel, times: int = 1) -> MemoryModel:
    """Fills the `steps` of a model, and returns the model.

    In step 0 all scans that keep more than their operands and results run in their first way. In
    each further step they recompute more and keep less. Enclosing scans run the program `times`
    times.
    """
    assert whole.graph is not None
    if len(whole.steps) > 1:
        return whole
    scans = [
        node
        for node, extra in zip(whole.nodes, whole.extra, strict=True)
        if node.primitive is _jax.SCAN and extra and not node.effects
        if isinstance(length := node.params["length"], int) and length > 1
    ]
    found = {node: _find_scan_ways(node, whole, times * len(scans)) for node in scans}
    known: Any = {"active": whole.active, "residuals": whole.residuals}
    model_step = functools.partial(model, whole.graph, whole.fusion, **known)
    for k in range(max(map(len, found.values()), default=0)):
        chosen = {node: ways[min(k, len(ways) - 1)] for node, ways in found.items()}
        whole.steps.append(model_step(scans=chosen))
    return whole


def _find_scan_ways(scan: Node, around: MemoryModel, count: int) -> list[ScanWay]:
    """Returns the ways that are Pareto-optimal in bytes and FLOPs. The bytes are what all `count`
    such scans keep, plus what the backward pass of one scan needs."""
    found = list(_scan_options(scan, around))
    flops = np.array([option.flops for option in found], float)
    size = np.array([count * option.kept + option.working for option in found], float)
    best = [found[k] for k in frontier(flops, size, TUNING.scan_options)]
    active = active_inputs(scan, around.active)
    ways = []
    for option in best:
        program = option.make()
        read = residuals_of(functools.partial(run_graph, program), program.in_avals, active)
        ways.append(ScanWay(program, read, option.working, option.flops, option.name))
    return ways


class _Option(NamedTuple):
    """A way to run a scan, with estimates of its cost.

    `make` returns the program; `flops` are all recomputed FLOPs; `kept` are the bytes that the scan
    keeps for its backward pass, and `working` are the further bytes that this pass needs.
    """

    make: Callable[[], Graph]
    flops: int
    kept: int
    working: int
    name: str


def _scan_options(scan: Node, around: MemoryModel) -> Iterator[_Option]:
    """Yields the ways to run a scan. The scans inside the body keep less; all iterations keep one
    save set; iterations take turns with two save sets; or iterations are grouped."""
    length = scan.params["length"]
    constants, carried = _jax.scan_split(scan.params)

    def model_body(graph: Graph) -> MemoryModel:
        active = active_in_body(scan, graph, around.active)
        return model(graph, active=active, residuals=around.residuals)

    given = [v.aval for v in scan.inputs]
    body = fill_steps(model_body(flatten(scan.regions["jaxpr"])), length)
    assert body.graph is not None

    def build_scan(ways: Sequence[Segment], size: int = 1) -> Graph:
        """Returns the scan whose iterations take turns with these ways, or are in groups of
        `size`."""
        first, *others = ways
        if others:
            inside = with_planned_regions(body, [Segment(0, len(body), step=first.step)])
            bodies = []
            for k, way in enumerate(ways):
                part = model_body(flatten(part_of(scan, inside, k, len(ways))))
                assert len(part) == len(body), "a part has the nodes of the body"
                bodies.append(with_planned_regions(part, [replace(way, step=0)]))
            run = in_turn(scan, bodies)
        else:
            run = in_groups(scan, with_planned_regions(body, [first]), size)
        return flatten(trace_graph(run, *given))

    carry_bytes = sum(nbytes(v.aval) for v in body.graph.inputs[constants : constants + carried])
    handed, around_it = handed_bytes(scan), cotangents_around(scan, body.graph, around.active)
    types = body.graph.in_avals
    is_unsharded = all(_jax.local_shape(t) == t.shape and not _jax.varying_axes(t) for t in types)
    for step, inside in enumerate(body.steps):
        names = dict.fromkeys(way.name for way in inside.scans.values())
        deeper = f"; inside these, {'; '.join(names)}" if names else ""
        piece = Piece(inside, 0, len(body))
        (cuts,) = find_hulls([network_of(piece)], TUNING.save_sets)
        ways = [Segment(0, len(body)), *recomputing(piece, cuts)]
        runs = [(way, piece.run(way)) for way in ways]
        for turn in _mix_neighbours(runs, length if is_unsharded else 1):
            first, _ = turn[0]
            if not (step or first.recompute):
                continue  # this way is the unchanged scan
            times = length // len(turn)
            kept = [local.staying + carry_bytes for _, local in turn]
            flops = sum(local.flops for _, local in turn)
            # While the backward pass of a turn runs one body, it holds what the other bodies kept.
            working = max(max(local.backward) for _, local in turn) + sum(kept[1:])
            yield _Option(
                functools.partial(build_scan, [replace(way, step=step) for way, _ in turn]),
                times * flops,
                times * sum(kept),
                max(0, working - around_it) + len(turn) * handed,
                f"{_describe_turn([way for way, _ in turn])}{deeper}",
            )
        if (size := group_size(length)) > 1:
            recomputed = Segment(0, len(body), recompute=True, step=step)
            local = piece.run(recomputed)
            # A group runs once more for the carries of its iterations, of which each is then
            # recomputed for its own backward step.
            yield _Option(
                functools.partial(build_scan, [recomputed], size),
                length * (body.total_flops + local.flops),
                length // size * carry_bytes,
                max(0, max(local.backward) - around_it) + handed + size * (carry_bytes + handed),
                f"scan bodies recomputed, in groups of {size}{deeper}",
            )


def _mix_neighbours(
    runs: Sequence[tuple[Segment, Local]], length: int
) -> Iterator[list[tuple[Segment, Local]]]:
    """Yields each way for all iterations, and mixtures of each two neighbouring ways. Without
    mixtures, the kept bytes change for all iterations or for none."""
    yield from ([run] for run in runs)
    recomputed = [run for run in runs if run[0].recompute]
    for (more, less), count in itertools.product(itertools.pairwise(recomputed), TUNING.in_turn):
        for part in range(1, count) if length % count == 0 else ():
            if math.gcd(part, count) == 1:
                yield [more] * part + [less] * (count - part)


def _describe_turn(turn: Sequence[Segment]) -> str:
    counts = Counter(
        f"recomputed but for {len(way.saved)} values" if way.recompute else "kept" for way in turn
    )
    if len(counts) == 1:
        return f"scan bodies {next(iter(counts))}"
    return f"of {len(turn)} scan bodies " + ", ".join(f"{n} {name}" for name, n in counts.items())
