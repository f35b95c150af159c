"""A plan, written into its graph: every segment that is recomputed becomes a `Recompute`, and scans
run in the ways of their segment's step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tracegrad.differentiation.pull_back import active_inputs
from tracegrad.ir import Graph, Node, Value
from tracegrad.planning.costs import nbytes
from tracegrad.planning.fusion import without_compiling
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.recomputed import Stretch, in_stretches
from tracegrad.planning.simulation import Piece, Segment
from tracegrad.planning.tuning import TUNING


def with_regions(model: MemoryModel, plan: Sequence[Segment]) -> Graph:
    """The graph of a model, rewritten; the model's own stays as it is."""
    assert model.graph is not None
    stretches = [_stretch(model, segment) for segment in plan]
    return in_stretches(model.graph, stretches, set(_copied(model)))


def _stretch(model: MemoryModel, segment: Segment) -> Stretch:
    start, stop = segment.start, segment.stop
    inside, written = model.steps[segment.step], model.nodes[start:stop]
    nodes = nodes_of(model, start, stop)
    instead = {n: way.program for n, way in inside.scans.items() if n in written}
    if not segment.recompute:
        return Stretch(nodes, instead)
    saved = {}
    for node in (model.nodes[i] for i in sorted(segment.saved)):
        positions = active_inputs(node, model.active)
        saved[node] = bool(positions and model.residuals.of(node, positions).results)
    waiting = Piece(inside, start, stop).run(segment.shifted(-start)).late.items()
    late = {written[v]: written[reader] for v, reader in waiting}
    return Stretch(nodes, instead, True, saved, late)


def _copied(model: MemoryModel) -> Iterator[Node]:
    """The nodes that XLA computes inside of what reads them and of which regions have copies: those
    not much smaller than all that has to be there for it, so that a sum of many, such as a residual
    stream, goes over the border itself; and as large as each that they take, since the cotangent of
    a part is as large as the whole, for each region that reads it."""
    assert model.graph is not None
    fusion = model.fusion or without_compiling(model.graph)
    there: dict[Value, frozenset[Value]] = {}
    for node, fate in zip(model.graph.nodes, fusion, strict=True):
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
    """The nodes from one operation up to another, each with those behind it that write no buffer,
    as XLA has written it there."""
    assert model.graph is not None
    nodes = model.graph.nodes
    first = nodes.index(model.nodes[start - 1]) + 1 if start else 0
    last = nodes.index(model.nodes[stop - 1]) + 1 if stop < len(model) else len(nodes)
    return nodes[first:last]
