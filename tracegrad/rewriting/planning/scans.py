"""A scan that keeps less of its body: the body planned from inside, then grouped.

What a scan keeps for its backward pass is kept once for each iteration. So its body is recomputed
whole, but for a save set; and beyond that the iterations go in groups of which only the first
carry is kept, each group being run again when its turn comes (Griewank's checkpointing at two
levels: the square root of the length is best).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from tracegrad import _jax
from tracegrad.ir import Graph, Node
from tracegrad.lowering import to_callable
from tracegrad.rewriting.planning.cuts import Network
from tracegrad.rewriting.planning.flatten import flatten, replace_values
from tracegrad.rewriting.planning.model import MemoryModel
from tracegrad.rewriting.planning.modelling import model
from tracegrad.rewriting.planning.regions import with_regions
from tracegrad.rewriting.planning.simulation import Piece, Segment

MOST_SAVE_SETS = 4


@dataclass(frozen=True)
class Variant:
    """A program of which the scans keep less.

    `flops`: what its scans run again inside, in all.
    """

    graph: Graph
    flops: int
    name: str


def variants(whole: MemoryModel) -> Iterator[Variant]:
    """The program as it is, then ever smaller ones: the same step for every scan that keeps
    something beside its operands and results."""
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
    bodies = {node: _options(node) for node in scans}
    most = max(map(len, bodies.values()))
    for k in range(most):
        new = graph.copy()
        here = dict(zip(graph.nodes, list(new.nodes), strict=True))
        flops, names = 0, []
        for node in scans:
            option = bodies[node][min(k, len(bodies[node]) - 1)]
            flops += option.flops
            names.append(option.name)
            at = here[node]
            results = new.insert(option.program, at.inputs, before=at)
            replace_values(new, dict(zip(at.outputs, results, strict=True)))
            new.erase(at)
        yield Variant(flatten(new), flops, "; ".join(dict.fromkeys(names)))


@dataclass(frozen=True)
class _Option:
    program: Callable[..., list[Any]]
    flops: int
    name: str


def _is_plain(node: Node) -> bool:
    length = node.params["length"]
    return isinstance(length, int) and length > 1 and not node.effects


def _options(node: Node) -> list[_Option]:
    """Ways to run a scan, from the one that computes the least again."""
    length = node.params["length"]
    flat = flatten(node.regions["jaxpr"])
    body = model(flat)
    piece = Piece(body, 0, len(body))
    must_run = [i for i, size in enumerate(piece.extra) if size]
    options = []
    for cut in Network(piece, piece.needed, must_run).hull(MOST_SAVE_SETS):
        region = with_regions(body, [Segment(0, len(body), True, cut.saved)])
        what = f"scan bodies recomputed but for {len(cut.saved)} values"
        options.append(_Option(_scan(node, to_callable(region), 1), cut.flops * length, what))
    size = group_size(length)
    if size > 1:
        region = with_regions(body, [Segment(0, len(body), True)])
        flops = length * (body.total_flops + cut.flops)
        what = f"scan bodies recomputed, in groups of {size}"
        options.append(_Option(_scan(node, to_callable(region), size), flops, what))
    return options


def group_size(length: int) -> int:
    """The divisor of a length that is nearest to its square root, in proportion; 1 for a prime."""
    divisors = [d for d in range(2, length) if length % d == 0]
    return min(divisors, key=lambda d: (d + length // d, d), default=1)


def _scan(node: Node, body: Callable[..., list[Any]], size: int) -> Callable[..., list[Any]]:
    """The same scan of another body, in groups of so many iterations."""
    params = node.params
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
