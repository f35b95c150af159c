"""A scan that keeps less of its body: planned from inside, in turn one way and another, or grouped.

What a scan keeps for its backward pass is kept once for each iteration. So its body is recomputed
whole, but for a save set, in every iteration or in some of them; and beyond that the iterations go
in groups of which only the first carry is kept, each group being run again when its turn comes.
Where the host may keep something, carry and save set go there. All of that for each way to run the
scans that are inside the body.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.activity import active_in_body
from tracegrad.ir import Graph, Node, Value
from tracegrad.ir.costs import nbytes
from tracegrad.ir.dependence import data_flow, spread
from tracegrad.planning.fusion import Fusion, moved
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.modelling import handed_bytes, model
from tracegrad.planning.planner import Planner, frontier, recomputing
from tracegrad.planning.regions import with_regions
from tracegrad.planning.simulation import Piece, Segment, keep_all
from tracegrad.planning.tuning import TUNING
from tracegrad.rewriting.flatten import flatten
from tracegrad.rewriting.scan_groups import group_size, in_groups, in_turn, part_of


@dataclass(frozen=True)
class Variant:
    """A program of which the scans keep less: the first is the program as it is.

    `modelled`: makes its model, which takes a while. `flops`: what its scans run again inside, in
    all. `least`: bytes that one of these keeps for its backward pass, below which a plan will not
    be.
    """

    number: int
    modelled: Callable[[], MemoryModel] = field(repr=False)
    flops: int = 0
    least: int = 0
    name: str = ""

    @functools.cached_property
    def model(self) -> MemoryModel:
        return self.modelled()

    @functools.cached_property
    def planner(self) -> Planner:
        return Planner(self.model)


def variants(
    whole: MemoryModel, modelled: Callable[[Graph, Fusion | None], MemoryModel], times: int = 1
) -> Iterator[Variant]:
    """The program as it is, then those that run ever more again to keep ever less: the same step
    for every scan that keeps something beside its operands and results.

    `modelled`: makes the model of such a program, given what becomes of its results. `times`: how
    often the program is run, in scans around.
    """
    graph = whole.graph
    assert graph is not None
    yield Variant(0, lambda: whole)
    scans = [
        node
        for node, extra in zip(whole.nodes, whole.extra, strict=True)
        if node.primitive is _jax.SCAN and extra and _is_plain(node)
    ]
    if not scans:
        return
    options = {node: _best(_options(node, whole), times * len(scans)) for node in scans}

    def with_options(chosen: Mapping[Node, _Option]) -> MemoryModel:
        new = graph.copy()
        for node, option in chosen.items():
            option.put(new, new.node_here(node))
        flat = flatten(new)
        return modelled(flat, whole.fusion and moved(whole.fusion, graph, flat))

    for k in range(max(map(len, options.values()))):
        chosen = {node: found[min(k, len(found) - 1)] for node, found in options.items()}
        flops = sum(option.flops for option in chosen.values())
        least = max(option.least for option in chosen.values())
        name = "; ".join(dict.fromkeys(option.name for option in chosen.values()))
        yield Variant(k + 1, functools.partial(with_options, chosen), flops, least, name)


class _Way(NamedTuple):
    """A way to run one iteration: a segment, what it runs again, how many bytes it keeps for its
    backward pass, at least and with the carry, and how many come back for that from the host."""

    segment: Segment
    flops: int
    least: int
    kept: int
    back: int
    name: str


@dataclass(frozen=True)
class _Option:
    """A way to run a scan: ways to run its body, in turn, and how many iterations go in a group.

    `flops`: what it runs again, in all. `least`, `kept`, `working`: bytes that it keeps for its
    backward pass, at least and with its carries, and about how many that needs beside them.
    """

    modelled: Callable[[Graph], MemoryModel]
    body: MemoryModel
    ways: tuple[Segment, ...]
    size: int
    flops: int
    least: int
    kept: int
    working: int
    name: str

    def put(self, graph: Graph, node: Node) -> None:
        """Has the scan of a graph run so."""
        assert self.body.graph is not None
        constants, carried = _jax.scan_split(node.params)
        first, *others = self.ways
        if others:
            bodies = []
            for k, way in enumerate(self.ways):
                part = part_of(node, self.body.graph, k, len(self.ways))
                bodies.append(with_regions(self.modelled(flatten(part)), [way]))
            graph.replace(node, in_turn(node, bodies))
            return
        on_host = range(constants, constants + carried) if first.offload else ()
        graph.set_region(node, "jaxpr", with_regions(self.body, [first], on_host))
        if self.size > 1:
            graph.replace(node, in_groups(node, self.size))


def _is_plain(node: Node) -> bool:
    length = node.params["length"]
    return isinstance(length, int) and length > 1 and not node.effects


def _options(node: Node, around: MemoryModel) -> Iterator[_Option]:
    """Its body as it is and with less kept in the scans inside it, each recomputed but for a save
    set, some iterations one way and some another, and in groups."""
    length = node.params["length"]
    constants, carried = _jax.scan_split(node.params)

    def modelled(graph: Graph, fusion: Fusion | None = None) -> MemoryModel:
        active = active_in_body(node, graph, around.active)
        known = around.residuals
        return model(graph, fusion, active=active, residuals=known, transfer=around.transfer)

    whole = modelled(flatten(node.regions["jaxpr"]))
    assert whole.graph is not None
    carry = sum(nbytes(v.aval) for v in whole.graph.inputs[constants : constants + carried])
    handed, types = handed_bytes(node), whole.graph.in_avals
    is_on_one = all(_jax.local_shape(t) == t.shape and not _jax.varying_axes(t) for t in types)
    for variant in variants(whole, modelled, length):
        body, inside = variant.model, f"; inside these, {variant.name}" if variant.name else ""
        option, peak = functools.partial(_Option, modelled, body), keep_all(body).peak + handed
        ways = list(_ways(body, carry, constants))
        for turn in _turns(ways, length if is_on_one else 1):
            if turn == ways[:1] and not variant.name:
                continue  # the scan as it is
            times, others = length // len(turn), len(turn) - 1
            flops, least, kept = (
                sum(each) for each in zip(*(way[1:4] for way in turn), strict=True)
            )
            working = peak + turn[0].back + others * handed + kept - turn[0].kept
            flops, name = times * flops + length * variant.flops, f"{_told(turn)}{inside}"
            segments = tuple(way.segment for way in turn)
            yield option(segments, 1, flops, times * least, times * kept, working, name)
        if (size := group_size(length)) > 1:
            again = Segment(0, len(body), recompute=True)
            flops = variant.flops + body.total_flops + Piece(body, 0, len(body)).run(again).flops
            working, kept = peak + size * (carry + handed), length // size * carry
            name = f"scan bodies recomputed, in groups of {size}{inside}"
            yield option((again,), size, length * flops, 0, kept, working, name)


def _ways(body: MemoryModel, carry: int, constants: int) -> Iterator[_Way]:
    """From all that is kept to nothing, and on the host; `carry`: bytes of what is kept anyway,
    `constants`: how many of what comes in is the same in each iteration, as JAX keeps once what is
    made of it."""
    assert body.graph is not None
    varying: dict[Value, int] = {}
    given = [int(i >= constants) for i in range(len(body.graph.inputs))]
    spread(body.graph, given, data_flow, varying)
    differs = [any(varying.get(v) for v in node.outputs) for node in body.nodes]
    piece = Piece(body, 0, len(body))
    for segment in (Segment(0, len(body)), *recomputing(piece)):
        local = piece.run(segment)
        name = f"recomputed but for {len(segment.saved)} values" if segment.recompute else "kept"
        least = sum(piece.sizes[v] for v in local.stored if differs[v])
        way = _Way(segment, local.flops, least, local.staying + carry, 0, name)
        if segment.offload:
            back = carry + sum(piece.sizes[v] for v in segment.saved)
            flops = local.flops + int(body.transfer * carry)
            way = _Way(segment, flops, 0, 0, back, f"{name} on the host")
        yield way


def _turns(ways: Sequence[_Way], length: int) -> Iterator[list[_Way]]:
    """Each way for all iterations, and of each two that are next to each other some of the one and
    some of the other: what is kept comes in steps of a whole body otherwise."""
    yield from ([way] for way in ways)
    here = [way for way in ways if way.segment.recompute and not way.segment.offload]
    for (more, less), count in itertools.product(itertools.pairwise(here), TUNING.in_turn):
        for part in range(1, count) if length % count == 0 else ():
            if math.gcd(part, count) == 1:
                yield [more] * part + [less] * (count - part)


def _told(turn: Sequence[_Way]) -> str:
    counts = Counter(way.name for way in turn)
    if len(counts) == 1:
        return f"scan bodies {turn[0].name}"
    return f"of {len(turn)} scan bodies " + ", ".join(f"{n} {name}" for name, n in counts.items())


def _best(options: Iterable[_Option], count: int) -> list[_Option]:
    """Those that no other spares both bytes and FLOPs to, if such scans are run so many times: the
    backward pass of one works while the others still keep what they do."""
    found = list(options)
    flops = np.array([option.flops for option in found], float)
    size = np.array([count * option.kept + option.working for option in found], float)
    return [found[k] for k in frontier(flops, size, TUNING.scan_options)]
