"""A graph → what its operations read, write and cost, as XLA runs them.

A buffer is what XLA writes to memory. Views are not: reading one is reading what it is a view of.
Nor is a result that XLA was seen to compute inside each of its readers (see `fusion`): the backward
pass does the same with it, whether or not anything is recomputed, and so it is what such a result
is computed from that is kept. Arguments of the program and constants are alive anyway and count as
nothing, and so do gradients of arguments, which are results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tracegrad import _jax
from tracegrad._jax.spans import alive
from tracegrad.differentiation.pull_back import active_inputs
from tracegrad.ir import CustomGradient, Graph, Literal, Node, Value, has_gradient, operations
from tracegrad.planning.activity import active_in_body, active_values
from tracegrad.planning.costs import is_by_element, nbytes, node_flops
from tracegrad.planning.flatten import flatten
from tracegrad.planning.fusion import Fusion, without_compiling
from tracegrad.planning.model import MemoryModel, ScanWay
from tracegrad.planning.residuals import NodeResiduals, Residuals
from tracegrad.planning.simulation import keep_all


def model(
    graph: Graph,
    fusion: Fusion | None = None,
    *,
    active: Collection[Value] | None = None,
    residuals: NodeResiduals | None = None,
    scans: Mapping[Node, ScanWay] | None = None,
) -> MemoryModel:
    """The model of a graph without plain calls (see `flatten`).

    Args:
      graph: the forward program.
      active: the values that get a cotangent; without it those between any input and any output.
      fusion: what becomes of the results; without it all but views are taken to be written, as
        JAX's own residuals are before XLA has a part in it.
      residuals: what is known already, of `MemoryModel.residuals` of a program with such nodes.
      scans: those of `MemoryModel`.

    Raises ValueError for a program without a gradient.
    """
    active = active_values(graph) if active is None else active
    if not active:
        raise ValueError(
            "cannot plan what to recompute for a program without a gradient: no result of "
            f"{graph.name} is a float computed from its arguments"
        )
    fates = fusion or without_compiling(graph)
    found = _Modelling(graph, fates, active, residuals or NodeResiduals(), scans or {}).assemble()
    found.fusion = fusion
    return found


class _Modelling:
    """One graph: what each node reads, then buffer by buffer."""

    def __init__(
        self,
        graph: Graph,
        fusion: Fusion,
        active: Collection[Value],
        residuals: NodeResiduals,
        scans: Mapping[Node, ScanWay],
    ):
        self.graph, self.active, self.residuals, self.scans = graph, active, residuals, scans
        self.flops_known: dict[Graph, int] = {}
        self.peaks_known: dict[Graph, int] = {}
        self.fate = dict(zip(graph.nodes, fusion, strict=True))
        self.ops: list[Node] = []
        self.flops: list[int] = []
        nothing, given = frozenset[int](), (*graph.inputs, *graph.constants)
        # Of every value the buffers that are read for it, those where all is computed that can be,
        # and the FLOPs of what is inlined.
        self.roots: dict[Value | Literal, frozenset[int]] = dict.fromkeys(given, nothing)
        self.behind: dict[Value | Literal, frozenset[int]] = dict.fromkeys(given, nothing)
        self.inside: dict[Value, int] = dict.fromkeys(given, 0)
        self.read: dict[Node, Residuals] = {}  # by the backward pass of a node, if it has one
        for node in graph.nodes:
            values = set(node.operands)
            roots = nothing.union(*(self.roots[v] for v in values))
            behind = nothing.union(*(self.behind[v] for v in values))
            cost = sum(self.inside[v] for v in values) + node_flops(node, self.flops_known)
            if not self.fate[node].inlined:
                roots = frozenset((len(self.ops),))
                self.ops.append(node)
                self.flops.append(cost)
                cost, behind = 0, behind if self.fate[node].repeated else roots
            for value in node.outputs:
                self.roots[value], self.behind[value], self.inside[value] = roots, behind, cost
            positions = active_inputs(node, active)
            if positions and any(v in active for v in node.outputs):
                way = scans.get(node)
                self.read[node] = way.read if way else residuals.of(node, positions)

    def assemble(self) -> MemoryModel:
        ops = self.ops
        cotangents = self._cotangent_bytes()
        needs: list[set[int]] = [set() for _ in ops]
        behind: list[set[int]] = [set() for _ in ops]
        extra, beside, peaks = [0] * len(ops), [0] * len(ops), [0] * len(ops)
        fixed = [False] * len(ops)
        step = -1  # the last buffer at a node or before
        for node, size in zip(self.graph.nodes, cotangents, strict=True) if ops else ():
            fate = self.fate[node]
            # XLA makes some inside of others, and waits with others for what no plan changes.
            size = size if fate.cotangents is None else min(size, fate.cotangents)
            step += not fate.inlined
            # What is inlined and works by element goes back with what it is computed of; anything
            # else that is inlined has a step of its own, with what it is in, which follows.
            is_in_next = fate.inlined and not is_by_element(node)
            at = min(max(step + is_in_next, 0), len(ops) - 1)
            fixed[at] |= bool(node.effects)
            peaks[at] = max(peaks[at], size)
            if read := self.read.get(node):
                atoms = [*(node.inputs[i] for i in read.operands)]
                atoms += [node.outputs[i] for i in read.results]
                values = [atom for atom in atoms if isinstance(atom, Value)]
                needs[at].update(*(self.roots.get(v, ()) for v in values))
                extra[at] += read.extra
                if is_by_element(node):
                    behind[at].update(*(self.behind.get(v, ()) for v in values))
                    beside[at] += fate.beside
        return MemoryModel(
            sizes=[sum(nbytes(v.aval) for v in node.outputs) for node in ops],
            flops=self.flops,
            args=[tuple(sorted({r for v in node.operands for r in self.roots[v]})) for node in ops],
            needs=[tuple(sorted(found)) for found in needs],
            behind=[tuple(sorted(b - a)) for a, b in zip(needs, behind, strict=True)],
            cotangents=peaks,
            extra=extra,
            beside=beside,
            fixed=fixed,
            nodes=ops,
            graph=self.graph,
            active=self.active,
            residuals=self.residuals,
            again=[self.scans[n].flops if n in self.scans else 0 for n in ops],
            scans=self.scans,
        )

    def _cotangent_bytes(self) -> list[int]:
        """Bytes alive while each node is pulled back, of cotangents: of a value from the first step
        back that adds to it, which is that of its last reader, to that of its producer. Not of
        arguments, by any shape: their terms wait for each other whatever the plan is, and what is
        seen of that in a compiled program corrects the plan."""
        given = {*self.graph.inputs, *self.graph.constants}
        for node in self.graph.nodes:
            if node.op in operations.RESHAPES and given.issuperset(node.operands):
                given.update(node.outputs)
        first = {v: i for i, node in enumerate(self.graph.nodes) for v in node.outputs}
        readers = ((i, node) for i, node in enumerate(self.graph.nodes) if node in self.read)
        last = {v: i for i, node in readers for v in node.operands}
        outputs = (v for v in self.graph.outputs if isinstance(v, Value))
        last |= dict.fromkeys(outputs, len(self.graph.nodes))
        spans = (
            (first[v], last[v], nbytes(v.aval)) for v in self.active if v in last and v not in given
        )
        live = alive(spans, len(self.graph.nodes))
        return [
            size + (self.work(node) if node in self.read else 0)
            for size, node in zip(live, self.graph.nodes, strict=True)
        ]

    def work(self, node: Node) -> int:
        """Bytes that the backward pass of a loop or a recomputed region needs inside: those of one
        iteration with everything kept."""
        if isinstance(node, CustomGradient) or not node.regions:
            return 0
        if node in self.scans:
            return self.scans[node].working
        is_scan = node.primitive is _jax.SCAN
        inside = max(
            self._region_peak(node, region) - cotangents_around(node, region, self.active)
            for region in node.regions.values()
        )
        return max(inside, 0) + (handed_bytes(node) if is_scan else 0)

    def _region_peak(self, node: Node, region: Graph) -> int:
        if region not in self.peaks_known:
            try:
                body = flatten(region)
                is_scan = node.primitive is _jax.SCAN
                active = active_in_body(node, body, self.active) if is_scan else None
                inside = model(body, active=active, residuals=self.residuals)
                self.peaks_known[region] = keep_all(inside).peak
            except ValueError:  # it has no gradient by itself
                self.peaks_known[region] = 0
        return self.peaks_known[region]


def cotangents_around(node: Node, region: Graph, active: Collection[Value]) -> int:
    """Bytes of cotangents that are counted inside a region as well as around the node; a loop has
    those of its carry where they were before it."""
    pairs = list(zip(region.outputs, node.outputs, strict=False))
    if node.primitive is _jax.SCAN:
        pairs = pairs[: _jax.scan_split(node.params)[1]]
    both = {inner for inner, outer in pairs if isinstance(inner, Value) and outer in active}
    return sum(nbytes(v.aval) for v in both)


def handed_bytes(scan: Node) -> int:
    """Bytes of what an iteration has of its own of what comes into it: the slices that are cut out
    for it and, of slices and constants, the gradients that it writes before they are put in their
    places or added up."""
    body = scan.regions["jaxpr"]
    constants, carried = _jax.scan_split(scan.params)
    read, cut = body.inputs[:constants], body.inputs[constants + carried :]
    gradients = [v for v in (*read, *cut) if has_gradient(v)]
    return sum(nbytes(v.aval) for v in (*cut, *gradients))
