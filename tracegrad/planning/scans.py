"""A scan that keeps less of its body: the body planned from inside, then grouped.

What a scan keeps for its backward pass is kept once for each iteration. So its body is recomputed
whole, but for a save set; and beyond that the iterations go in groups of which only the first
carry is kept, each group being run again when its turn comes (Griewank's checkpointing at two
levels: the square root of the length is best). Where the host may keep something, carry and save
set go there. All of that for each way to run the scans that are inside the body.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.activity import active_in_body
from tracegrad.ir import Graph, Node
from tracegrad.ir.costs import nbytes
from tracegrad.planning.fusion import Fusion, moved
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.modelling import handed_bytes, model
from tracegrad.planning.planner import Planner, frontier, recomputing
from tracegrad.planning.regions import with_regions
from tracegrad.planning.simulation import Piece, Segment, keep_all
from tracegrad.planning.tuning import TUNING
from tracegrad.rewriting.flatten import flatten
from tracegrad.rewriting.scan_groups import group_size, in_groups


@dataclass(frozen=True)
class Variant:
    """A program of which the scans keep less: the first is the program as it is.

    `flops`: what its scans run again inside, in all.
    """

    number: int
    model: MemoryModel
    flops: int = 0
    name: str = ""

    @functools.cached_property
    def planner(self) -> Planner:
        return Planner(self.model)


def variants(
    whole: MemoryModel, modelled: Callable[[Graph, Fusion | None], MemoryModel]
) -> Iterator[Variant]:
    """The program as it is, then those that run ever more again to keep ever less: the same step
    for every scan that keeps something beside its operands and results.

    `modelled`: makes the model of such a program, given what becomes of its results.
    """
    graph = whole.graph
    assert graph is not None
    yield Variant(0, whole)
    scans = [
        node
        for node, extra in zip(whole.nodes, whole.extra, strict=True)
        if node.primitive is _jax.SCAN and extra and _is_plain(node)
    ]
    if not scans:
        return
    options = {node: _best(_options(node, whole), len(scans)) for node in scans}
    for k in range(max(map(len, options.values()))):
        new = graph.copy()
        chosen = {node: found[min(k, len(found) - 1)] for node, found in options.items()}
        for node, option in chosen.items():
            option.put(new, new.node_here(node))
        flops = sum(option.flops for option in chosen.values())
        name = "; ".join(dict.fromkeys(option.name for option in chosen.values()))
        flat = flatten(new)
        fusion = whole.fusion and moved(whole.fusion, graph, flat)
        yield Variant(k + 1, modelled(flat, fusion), flops, name)


@dataclass(frozen=True)
class _Option:
    """A way to run a scan: one to run its body, and how many iterations go in a group.

    `flops`: what it runs again, in all. `kept`, `working`: about how many bytes it keeps for its
    backward pass, and how many that needs beside them.
    """

    body: MemoryModel
    way: Segment
    size: int
    flops: int
    kept: int
    working: int
    name: str

    def put(self, graph: Graph, node: Node) -> None:
        """Has the scan of a graph run so."""
        constants, carried = _jax.scan_split(node.params)
        on_host = range(constants, constants + carried) if self.way.offload else ()
        graph.set_region(node, "jaxpr", with_regions(self.body, [self.way], on_host))
        if self.size > 1:
            graph.replace(node, in_groups(node, self.size))


def _is_plain(node: Node) -> bool:
    length = node.params["length"]
    return isinstance(length, int) and length > 1 and not node.effects


def _options(node: Node, around: MemoryModel) -> Iterator[_Option]:
    """Its body as it is and with less kept in the scans inside it, each recomputed but for a save
    set, and in groups."""
    length = node.params["length"]
    constants, carried = _jax.scan_split(node.params)

    def modelled(graph: Graph, fusion: Fusion | None = None) -> MemoryModel:
        active = active_in_body(node, graph, around.active)
        known = around.residuals
        return model(graph, fusion, active=active, residuals=known, transfer=around.transfer)

    whole = modelled(flatten(node.regions["jaxpr"]))
    assert whole.graph is not None
    carry = sum(nbytes(v.aval) for v in whole.graph.inputs[constants : constants + carried])
    handed = handed_bytes(node)
    for variant in variants(whole, modelled):
        body = variant.model
        inside = f"; inside these, {variant.name}" if variant.name else ""
        everything = keep_all(body)
        working = everything.peak + handed
        keeping, again = Segment(0, len(body)), Segment(0, len(body), recompute=True)
        if variant.name:
            kept = length * (everything.residual + carry)
            name = f"scan bodies kept{inside}"
            yield _Option(body, keeping, 1, length * variant.flops, kept, working, name)
        piece = Piece(body, 0, len(body))
        for way in recomputing(piece):
            local = piece.run(way)
            flops, kept, sent, host = local.flops, length * (local.staying + carry), 0, ""
            if way.offload:
                flops += int(body.transfer * carry)
                kept, sent = 0, carry + sum(piece.sizes[v] for v in way.saved)
                host = " on the host"
            flops = length * (variant.flops + flops)
            name = f"scan bodies recomputed but for {len(way.saved)} values{host}{inside}"
            yield _Option(body, way, 1, flops, kept, sent + working, name)
        size = group_size(length)
        if size > 1:
            flops = length * (variant.flops + body.total_flops + piece.run(again).flops)
            working += size * (carry + handed)
            name = f"scan bodies recomputed, in groups of {size}{inside}"
            yield _Option(body, again, size, flops, length // size * carry, working, name)


def _best(options: Iterable[_Option], count: int) -> list[_Option]:
    """Those that no other spares both bytes and FLOPs to, if there are so many such scans: the
    backward pass of one works while the others still keep what they do."""
    found = list(options)
    flops = np.array([option.flops for option in found], float)
    size = np.array([count * option.kept + option.working for option in found], float)
    return [found[k] for k in frontier(flops, size, TUNING.scan_options)]
