"""A plan, written into its graph: every segment that is recomputed becomes a `Recompute`, and scans
run in the ways of their segment's step."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from tracegrad.differentiation.pull_back import active_inputs
from tracegrad.ir import Graph, Node, Value
from tracegrad.ir.costs import nbytes
from tracegrad.ir.grouping import leaving
from tracegrad.planning.fusion import without_compiling
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.simulation import Piece, Segment
from tracegrad.planning.tuning import TUNING
from tracegrad.rewriting.recomputed import recompute_but_for


def with_regions(
    model: MemoryModel, plan: Sequence[Segment], offloaded: Collection[int] = ()
) -> Graph:
    """The graph of a model, rewritten; the model's own stays as it is.

    `offloaded`: the positions of its inputs that may be kept on the host as well.
    """
    assert model.graph is not None
    graph = model.graph.copy()
    inputs = [graph.inputs[i] for i in offloaded]
    names = (f"planned_{k}" for k in itertools.count())
    copied = {graph.node_here(node) for node in _copied(model)}
    for segment in reversed(plan):  # what comes before it stays where it is
        start, stop = segment.start, segment.stop
        inside, written = model.steps[segment.step], model.nodes[start:stop]
        scans = ((n, way) for n, way in inside.scans.items() if n in written)
        instead = {graph.node_here(n): way.program for n, way in scans}
        if segment.recompute:
            nodes = [graph.node_here(n) for n in nodes_of(model, start, stop)]
            saved = {}
            for node in (model.nodes[i] for i in sorted(segment.saved)):
                positions = active_inputs(node, model.active)
                reads = positions and model.residuals.of(node, positions).results
                saved[graph.node_here(node)] = bool(reads)
            waiting = Piece(inside, start, stop).run(segment.shifted(-start)).late.items()
            here = [graph.node_here(n) for n in written]
            late = {here[v]: here[reader] for v, reader in waiting}
            on_host = inputs if segment.offload else None
            recompute_but_for(graph, nodes, saved, names, instead, late, copied, on_host)
        else:
            for node, program in instead.items():
                graph.replace(node, program)
    for node in reversed(graph.nodes):
        if node in copied and not leaving(graph, [node]):
            graph.erase(node)
    return graph


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
        made = [v for v in taken if v.producer is not None]
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
