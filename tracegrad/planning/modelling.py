"""A graph → what its operations read, write and cost, as XLA runs them.

A buffer is what XLA writes to memory. Views are not: reading one is reading what it is a view of.
Nor is a result that XLA was seen to compute inside each of its readers (see `fusion`): the backward
pass does the same with it, whether or not anything is recomputed, and so it is what such a result
is computed from that is kept. Arguments of the program and constants are alive anyway and count as
nothing, and so do gradients of arguments, which are results.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from tracegrad import _jax
from tracegrad._jax.spans import alive
from tracegrad.differentiation.activity import active_in_body, active_values
from tracegrad.differentiation.pull_back import active_inputs
from tracegrad.differentiation.residuals import NodeResiduals, Residuals
from tracegrad.ir import CustomGradient, Graph, Node, Value, operations
from tracegrad.ir.costs import is_by_element, nbytes, node_flops
from tracegrad.planning.fusion import Fusion, without_compiling
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.simulation import keep_all
from tracegrad.rewriting.flatten import flatten


def model(
    graph: Graph,
    fusion: Fusion | None = None,
    *,
    active: Collection[Value] | None = None,
    residuals: NodeResiduals | None = None,
    transfer: float = math.inf,
) -> MemoryModel:
    """The model of a graph without plain calls (see `flatten`).

    Args:
      graph: the forward program.
      active: the values that get a cotangent; without it those between any input and any output.
      fusion: what becomes of the results; without it all but views are taken to be written, as
        JAX's own residuals are before XLA has a part in it.
      residuals: what is known already, of `MemoryModel.residuals` of a program with such nodes.
      transfer: that of `MemoryModel`.

    Raises ValueError for a program without a gradient.
    """
    found = _Modelling(graph, fusion or without_compiling(graph), residuals, active).result()
    found.fusion, found.transfer = fusion, transfer
    return found


class _Modelling:
    """One graph, one step after the other; each fills in a few of the attributes."""

    def __init__(
        self,
        graph: Graph,
        fusion: Fusion,
        residuals: NodeResiduals | None,
        active: Collection[Value] | None = None,
    ):
        self.graph = graph
        self.residuals = residuals or NodeResiduals()
        self.is_output = {v for v in graph.outputs if isinstance(v, Value)}
        self.active = active_values(graph) if active is None else active
        self.flops_known: dict[Graph, int] = {}
        self.peaks_known: dict[Graph, int] = {}
        self.fate = dict(zip(graph.nodes, fusion, strict=True))
        self.read: dict[Node, Residuals] = {}  # by the backward pass of a node, if it has one
        for node in graph.nodes:
            positions = active_inputs(node, self.active)
            if positions and any(v in self.active for v in node.outputs):
                self.read[node] = self.residuals.of(node, positions)

    def result(self) -> MemoryModel:
        if not self.active:
            raise ValueError(
                "cannot plan what to recompute for a program without a gradient: no result of "
                f"{self.graph.name} is a float computed from its arguments"
            )
        self.find_roots()
        return self.assemble()

    def find_roots(self) -> None:
        """For every value the buffers that reading it reads, those where all is computed that can
        be, and the FLOPs of what is inlined."""
        self.roots: dict[Value, frozenset[int]] = {}
        self.behind: dict[Value, frozenset[int]] = {}
        self.inside: dict[Value, int] = {}
        self.ops: list[Node] = [n for n in self.graph.nodes if not self.fate[n].inlined]
        number = {node: i for i, node in enumerate(self.ops)}
        nothing: frozenset[int] = frozenset()
        for value in (*self.graph.inputs, *self.graph.constants):
            self.roots[value], self.behind[value], self.inside[value] = nothing, nothing, 0
        for node in self.graph.nodes:
            values, fate = set(operands(node)), self.fate[node]
            roots = behind = frozenset((number[node],)) if node in number else nothing
            cost = 0
            if fate.inlined:
                roots = nothing.union(*(self.roots[v] for v in values))
                cost = sum(self.inside[v] for v in values) + node_flops(node, self.flops_known)
            if fate.inlined or fate.repeated:
                behind = nothing.union(*(self.behind[v] for v in values))
            for value in node.outputs:
                self.roots[value], self.behind[value], self.inside[value] = roots, behind, cost

    def assemble(self) -> MemoryModel:
        ops = self.ops
        cotangents = self._cotangent_bytes()
        needs: list[set[int]] = [set() for _ in ops]
        behind: list[set[int]] = [set() for _ in ops]
        extra = [0] * len(ops)
        beside = [0] * len(ops)
        peaks = [0] * len(ops)
        fixed = [False] * len(ops)
        step = -1  # the last buffer at a node or before
        for node, size in zip(self.graph.nodes, cotangents, strict=True) if ops else ():
            fate = self.fate[node]
            step += not fate.inlined
            at = min(max(step + self._is_in_next(node), 0), len(ops) - 1)
            fixed[at] |= bool(node.effects)
            peaks[at] = max(peaks[at], size)
            if node in self.read:
                for value in self._read_back(node):
                    needs[at] |= self.roots[value]
                    if is_by_element(node):
                        behind[at] |= self.behind[value]
                extra[at] += self.read[node].extra
                beside[at] += fate.beside if is_by_element(node) else 0
        return MemoryModel(
            sizes=[sum(nbytes(v.aval) for v in node.outputs) for node in ops],
            flops=[
                node_flops(node, self.flops_known)
                + sum(self.inside[v] for v in set(operands(node)))
                for node in ops
            ],
            args=[_sorted(r for v in operands(node) for r in self.roots[v]) for node in ops],
            needs=[_sorted(found) for found in needs],
            behind=[_sorted(more - found) for more, found in zip(behind, needs, strict=True)],
            cotangents=peaks,
            extra=extra,
            beside=beside,
            fixed=fixed,
            nodes=ops,
            graph=self.graph,
            active=self.active,
            residuals=self.residuals,
        )

    def _is_in_next(self, node: Node) -> bool:
        """Whether a node goes back with the buffer that follows. What is inlined and works by
        element goes back with what it is computed of; anything else has a step of its own, with
        what it is in."""
        return self.fate[node].inlined and not is_by_element(node)

    def _read_back(self, node: Node) -> Iterator[Value]:
        """The values of the graph that the backward pass of a node reads."""
        yield from (v for i in self.read[node].operands if isinstance(v := node.inputs[i], Value))
        yield from (node.outputs[i] for i in self.read[node].results)

    def _cotangent_bytes(self) -> list[int]:
        """Bytes alive while each node is pulled back, of cotangents: of a value from the first step
        back that adds to it, which is that of its last reader, to that of its producer. Not of
        arguments, by any shape: their terms wait for each other whatever the plan is, and what is
        seen of that in a compiled program corrects the plan."""
        given = {*self.graph.inputs, *self.graph.constants}
        for node in self.graph.nodes:
            if node.op in operations.RESHAPES and node.inputs[0] in given:
                given.update(node.outputs)
        first = {v: i for i, node in enumerate(self.graph.nodes) for v in node.outputs}
        last = {
            v: i
            for i, node in enumerate(self.graph.nodes)
            if node in self.read
            for v in operands(node)
        }
        last |= dict.fromkeys(self.is_output, len(self.graph.nodes))
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
        is_scan = node.primitive is _jax.SCAN
        inside = max(
            self._region_peak(node, region) - self._cotangents_from_outside(node, region)
            for region in node.regions.values()
        )
        return max(inside, 0) + (handed_bytes(node) if is_scan else 0)

    def _cotangents_from_outside(self, node: Node, region: Graph) -> int:
        """Bytes of cotangents that are counted inside a region as well as outside; a loop has
        those of its carry where they were before it."""
        pairs = list(zip(region.outputs, node.outputs, strict=False))
        if node.primitive is _jax.SCAN:
            pairs = pairs[: _jax.scan_split(node.params)[1]]
        both = {
            inner for inner, outer in pairs if isinstance(inner, Value) and outer in self.active
        }
        return sum(nbytes(v.aval) for v in both)

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


def _sorted(positions: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(positions)))


def operands(node: Node) -> list[Value]:
    return [v for v in node.inputs if isinstance(v, Value)]


def handed_bytes(scan: Node) -> int:
    """Bytes of what an iteration has of its own of what comes into it: the slices that are cut out
    for it and, of slices and constants, the gradients that it writes before they are put in their
    places or added up."""
    body = scan.regions["jaxpr"]
    constants, carried = _jax.scan_split(scan.params)
    read, cut = body.inputs[:constants], body.inputs[constants + carried :]
    gradients = [v for v in (*read, *cut) if v.has_gradient]
    return sum(nbytes(v.aval) for v in (*cut, *gradients))
