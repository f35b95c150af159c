"""Rewrites a graph by a plan: every recomputed segment becomes a `Recompute` node, and scans run as
the `step` of their segment says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tracegrad.differentiation.pull_back import active_inputs
from tracegrad.ir import Graph, Node, Value
from tracegrad.planning.activity import active_outputs
from tracegrad.planning.costs import nbytes
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.recomputed import Stretch, in_stretches
from tracegrad.planning.simulation import Piece, Segment
from tracegrad.planning.tuning import TUNING


def with_planned_regions(model: MemoryModel, plan: Sequence[Segment]) -> Graph:
    assert model.graph is not None
    stretches = [_make_stretch(model, segment) for segment in plan]
    return in_stretches(model.graph, stretches, set(_nodes_to_copy(model)))


def _make_stretch(model: MemoryModel, segment: Segment) -> Stretch:
    start, stop = segment.start, segment.stop
    inside, written = model.steps[segment.step], model.nodes[start:stop]
    nodes = nodes_of(model, start, stop)
    instead = {n: way.program for n, way in inside.scans.items() if n in written}
    if not segment.recompute:
        return Stretch(nodes, instead)
    saved = {}
    for node in (model.nodes[i] for i in sorted(segment.saved)):
        positions = active_inputs(node, model.active)
        ends = active_outputs(node, model.active)
        saved[node] = bool(positions and model.residuals.of(node, positions, ends).results)
    waiting = Piece(inside, start, stop).run(segment.shifted(-start)).late.items()
    late = {written[v]: written[reader] for v, reader in waiting}
    return Stretch(nodes, instead, True, saved, late)


def _nodes_to_copy(model: MemoryModel) -> Iterator[Node]:
    """Yields the inlined nodes that regions copy, instead of taking their results as operands.

    A node is copied if the buffers that it is computed from are at most `TUNING.terms` times as
    large as its result; so a sum of many terms, such as a residual stream, is an operand. And no
    operand of the node may be larger than the result: each region with a copy of a slice would have
    a cotangent as large as the whole operand.
    """
    assert model.graph is not None
    there: dict[Value, frozenset[Value]] = {}
    for node, fate in zip(model.graph.nodes, model.fusion, strict=True):
        taken = node.operands
        made = [v for v in taken if v in model.graph.producers]
        read = frozenset[Value]().union(*(there.get(v, {v}) for v in made))
        size = min((nbytes(v.aval) for v in node.outputs), default=0)
        is_whole = all(nbytes(v.aval) <= size for v in taken)
        is_small = sum(nbytes(v.aval) for v in read) <= TUNING.terms * size
        if fate.inlined and is_whole and is_small:
            there.update(dict.fromkeys(node.outputs, read))
            yield node


def nodes_of(model: MemoryModel, start: int, stop: int) -> Sequence[Node]:
    """Returns the nodes of the operations from `start` to `stop` (exclusive). A node that writes no
    buffer belongs to the next operation that writes a buffer; at the end of the program, to the
    last operation."""
    assert model.graph is not None
    nodes = model.graph.nodes
    first = nodes.index(model.nodes[start - 1]) + 1 if start else 0
    last = nodes.index(model.nodes[stop - 1]) + 1 if stop < len(model) else len(nodes)
    return nodes[first:last]
