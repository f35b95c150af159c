"""A scan that keeps less of its body: the body planned from inside, then grouped.

What a scan keeps for its backward pass is kept once for each iteration. So its body is recomputed
whole, but for a save set; and beyond that the iterations go in groups of which only the first
carry is kept, each group being run again when its turn comes (Griewank's checkpointing at two
levels: the square root of the length is best). Where the host may keep something, carry and save
set go there. All of that for each way to run the scans that are inside the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from tracegrad import _jax
from tracegrad.ir import Graph, Node
from tracegrad.planning.activity import active_in_body
from tracegrad.planning.flatten import flatten
from tracegrad.planning.fusion import handed_bytes
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.modelling import model
from tracegrad.planning.paths import frontier
from tracegrad.planning.planner import recomputing
from tracegrad.planning.regions import with_regions
from tracegrad.planning.residuals import nbytes
from tracegrad.planning.simulation import Piece, Segment, keep_all
from tracegrad.planning.tuning import TUNING
from tracegrad.tracing import to_callable


@dataclass(frozen=True)
class Variant:
    """A program of which the scans keep less.

    `flops`: what its scans run again inside, in all.
    """

    graph: Graph
    flops: int
    name: str


def variants(whole: MemoryModel) -> Iterator[Variant]:
    """The program as it is, then those that run ever more again to keep ever less: the same step
    for every scan that keeps something beside its operands and results."""
    graph = whole.graph
    assert graph is not None
    yield Variant(graph, 0, "")
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
        flops, names = 0, []
        for node in scans:
            option = options[node][min(k, len(options[node]) - 1)]
            flops += option.flops
            names.append(option.name)
            new.replace(new.node_here(node), option.program())
        yield Variant(flatten(new), flops, "; ".join(dict.fromkeys(names)))


@dataclass(frozen=True)
class _Option:
    """A way to run a scan.

    `flops`: what it runs again, in all. `kept`, `working`: about how many bytes it keeps for its
    backward pass, and how many that needs beside them.
    """

    program: Callable[[], Callable[..., list[Any]]]
    flops: int
    kept: int
    working: int
    name: str


def _is_plain(node: Node) -> bool:
    length = node.params["length"]
    return isinstance(length, int) and length > 1 and not node.effects


def _options(node: Node, around: MemoryModel) -> Iterator[_Option]:
    """Its body as it is and with less kept in the scans inside it, each recomputed but for a save
    set, and in groups."""
    length = node.params["length"]
    constants, carried = _jax.scan_split(node.params)

    def body_model(graph: Graph) -> MemoryModel:
        active = active_in_body(node, graph, around.active)
        return model(graph, active=active, residuals=around.residuals, transfer=around.transfer)

    whole = body_model(flatten(node.regions["jaxpr"]))
    assert whole.graph is not None
    carry = sum(nbytes(v.aval) for v in whole.graph.inputs[constants : constants + carried])
    handed = handed_bytes(node)
    for variant in variants(whole):
        body = body_model(variant.graph) if variant.name else whole
        inside = f"; inside these, {variant.name}" if variant.name else ""
        everything = keep_all(body)
        working = everything.peak + handed
        if variant.name:
            yield _Option(
                partial(_scan, node, variant.graph, 1),
                length * variant.flops,
                length * (everything.residual + carry),
                working,
                f"scan bodies kept{inside}",
            )
        piece = Piece(body, 0, len(body))
        for way in recomputing(piece):
            local = piece.run(way)
            sent = carry + sum(piece.sizes[v] for v in way.saved) if way.offload else 0
            flops = local.flops + (int(body.transfer * carry) if way.offload else 0)
            host = " on the host" if way.offload else ""
            yield _Option(
                partial(_recomputed, node, body, way),
                length * (variant.flops + flops),
                0 if way.offload else length * (local.staying + carry),
                sent + working,
                f"scan bodies recomputed but for {len(way.saved)} values{host}{inside}",
            )
        size = group_size(length)
        if size > 1:
            way = Segment(0, len(body), recompute=True)
            yield _Option(
                partial(_recomputed, node, body, way, size),
                length * (variant.flops + body.total_flops + piece.run(way).flops),
                length // size * carry,
                size * (carry + handed) + working,
                f"scan bodies recomputed, in groups of {size}{inside}",
            )


def _best(options: Iterable[_Option], count: int) -> list[_Option]:
    """Those that no other spares both bytes and FLOPs to, if there are so many such scans: the
    backward pass of one works while the others still keep what they do."""
    found = list(options)
    flops = np.array([option.flops for option in found], float)
    size = np.array([count * option.kept + option.working for option in found], float)
    return [found[k] for k in frontier(flops, size, TUNING.scan_options)]


def _recomputed(
    node: Node, body: MemoryModel, way: Segment, size: int = 1
) -> Callable[..., list[Any]]:
    constants, carried = _jax.scan_split(node.params)
    carry = range(constants, constants + carried)
    return _scan(node, with_regions(body, [way], carry if way.offload else ()), size)


def group_size(length: int) -> int:
    """The divisor of a length that is nearest to its square root, in proportion; 1 for a prime."""
    divisors = [d for d in range(2, length) if length % d == 0]
    return min(divisors, key=lambda d: (d + length // d, d), default=1)


def _scan(node: Node, graph: Graph, size: int) -> Callable[..., list[Any]]:
    """The same scan of another body, in groups of so many iterations."""
    params, body = node.params, to_callable(graph)
    constants, carried = _jax.scan_split(params)
    options = {"reverse": params["reverse"], "unroll": params["unroll"]}

    def run(*operands: Any) -> list[Any]:
        fixed = operands[:constants]
        carry = list(operands[constants : constants + carried])
        scanned = list(operands[constants + carried :])

        def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            results = body(*fixed, *carry, *slices)
            return results[:carried], results[carried:]

        if size == 1:
            final, stacked = lax.scan(step, carry, scanned, length=params["length"], **options)
            return [*final, *stacked]
        groups = params["length"] // size

        def group(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            return lax.scan(step, carry, slices, length=size, **options)

        final, stacked = lax.scan(
            jax.checkpoint(group),
            carry,
            [x.reshape(groups, size, *x.shape[1:]) for x in scanned],
            length=groups,
            reverse=params["reverse"],
        )
        return [*final, *(y.reshape(groups * size, *y.shape[2:]) for y in stacked)]

    run.__name__ = run.__qualname__ = "scan"
    return run
