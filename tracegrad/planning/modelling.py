"""Makes the memory model of a graph: the reads, writes and costs of its operations in XLA.

A buffer is an array that XLA writes to memory. A view is not a buffer: reading a view means reading
the viewed buffer. An inlined result (see `fusion`) is not a buffer either: the backward pass
computes the result again in any case, so its operands are kept. Arguments of the program,
constants, and gradients of arguments (which are results) are always alive, and count as zero bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from tracegrad import _jax
from tracegrad.differentiation.pull_back import active_inputs
from tracegrad.ir import CustomGradient, Graph, Literal, Node, Value, has_gradient, operations
from tracegrad.planning.activity import active_in_body, active_outputs, active_values
from tracegrad.planning.costs import is_by_element, nbytes, node_flops
from tracegrad.planning.flatten import flatten
from tracegrad.planning.fusion import Fusion, without_compiling
from tracegrad.planning.model import MemoryModel, ScanWay
from tracegrad.planning.residuals import NodeResiduals, Residuals
from tracegrad.planning.simulation import keep_all
from tracegrad.planning.spans import alive


def model(
    graph: Graph,
    fusion: Fusion | None = None,
    *,
    active: Collection[Value] | None = None,
    residuals: NodeResiduals | None = None,
    scans: Mapping[Node, ScanWay] | None = None,
) -> MemoryModel:
    """Returns the model of a graph that `flatten` has made.

    Args:
      fusion: how XLA treats the results; by default all results except views are written, as JAX's
        residuals are before XLA optimizes them.
      active: the values that get a cotangent; the default is `active_values` of the graph.
      residuals: the `MemoryModel.residuals` of a program with the same nodes, as a cache.

    Raises ValueError for a program without a gradient.
    """
    active = active_values(graph) if active is None else active
    if not active:
        raise ValueError(
            "cannot plan what to recompute for a program without a gradient: no result of "
            f"{graph.name} is a float computed from its arguments"
        )
    fusion = fusion or without_compiling(graph)
    return _Modelling(graph, fusion, active, residuals or NodeResiduals(), scans or {}).assemble()


class _Modelling:
    """Models one graph: first the reads of each node, then (`assemble`) the lists of the model."""

    def __init__(
        self,
        graph: Graph,
        fusion: Fusion,
        active: Collection[Value],
        residuals: NodeResiduals,
        scans: Mapping[Node, ScanWay],
    ):
        self.graph, self.active, self.residuals, self.scans = graph, active, residuals, scans
        self.region_flops: dict[Graph, int] = {}  # a cache
        self.region_peaks: dict[Graph, int] = {}  # a cache
        self.fusion, self.fate = fusion, dict(zip(graph.nodes, fusion, strict=True))
        self.ops: list[Node] = []
        self.flops: list[int] = []
        nothing, arguments = frozenset[int](), (*graph.inputs, *graph.constants)
        # For every value: the buffers from which readers get it (`roots`); the FLOPs of inlined
        # operations (`inside`).
        self.roots: dict[Value | Literal, frozenset[int]] = dict.fromkeys(arguments, nothing)
        self.inside: dict[Value, int] = dict.fromkeys(arguments, 0)
        self.reads: dict[Node, Residuals] = {}  # the residuals of each node with a backward step
        for node in graph.nodes:
            values = set(node.operands)
            roots = nothing.union(*(self.roots[v] for v in values))
            cost = sum(self.inside[v] for v in values) + node_flops(node, self.region_flops)
            if not self.fate[node].inlined:
                roots = frozenset((len(self.ops),))
                self.ops.append(node)
                self.flops.append(cost)
                cost = 0
            for value in node.outputs:
                self.roots[value], self.inside[value] = roots, cost
            positions = active_inputs(node, active)
            ends = active_outputs(node, active)
            if positions and ends:
                way = scans.get(node)
                self.reads[node] = way.read if way else residuals.of(node, positions, ends)

    def assemble(self) -> MemoryModel:
        ops = self.ops
        cotangents = self._cotangent_bytes()
        needs: list[set[int]] = [set() for _ in ops]
        extra, beside, peaks = [0] * len(ops), [0] * len(ops), [0] * len(ops)
        fixed = [False] * len(ops)
        step = -1  # the last buffer that was written so far
        for node, size in zip(self.graph.nodes, cotangents, strict=True) if ops else ():
            fate = self.fate[node]
            # XLA fuses some cotangents, and computes others later: use the observed bytes.
            size = size if fate.cotangents is None else min(size, fate.cotangents)
            step += not fate.inlined
            # An inlined element-wise node is pulled back with its operands. Any other inlined node
            # is pulled back with the node that contains it, which follows.
            is_in_next = fate.inlined and not is_by_element(node)
            at = min(max(step + is_in_next, 0), len(ops) - 1)
            fixed[at] |= bool(node.effects)
            peaks[at] = max(peaks[at], size)
            if read := self.reads.get(node):
                atoms = [*(node.inputs[i] for i in read.operands)]
                atoms += [node.outputs[i] for i in read.results]
                values = [atom for atom in atoms if isinstance(atom, Value)]
                needs[at].update(*(self.roots.get(v, ()) for v in values))
                extra[at] += read.extra
                if read.compares and not fate.inlined:
                    extra[at] = max(extra[at], 1)  # see `_find_compared`
                if not read.extra:  # otherwise these bytes are counted already
                    beside[at] += fate.beside
        args = [tuple(sorted({r for v in node.operands for r in self.roots[v]})) for node in ops]
        for i in self._find_compared(args):
            extra[i] = max(extra[i], 1)
        return MemoryModel(
            sizes=[sum(nbytes(v.aval) for v in node.outputs) for node in ops],
            flops=self.flops,
            args=args,
            needs=[tuple(sorted(found)) for found in needs],
            cotangents=peaks,
            extra=extra,
            beside=beside,
            fixed=fixed,
            nodes=ops,
            graph=self.graph,
            active=self.active,
            fusion=self.fusion,
            residuals=self.residuals,
            inner_flops=[self.scans[n].flops if n in self.scans else 0 for n in ops],
            scans=self.scans,
        )

    def _find_compared(self, args: Sequence[Sequence[int]]) -> Iterator[int]:
        """Yields the operations whose result is one of the values that it is later compared with: a
        maximum, or the smallest of the largest k elements.

        XLA may round a value in another way when it is computed again. If the maximum of the value
        was saved, then no element would be equal to the maximum, and the gradient would be wrong.
        So the maximum is computed again, too.
        """
        for node in self.graph.nodes if self.ops else ():
            if node.op in operations.COMPARISONS:
                roots = [self.roots[v] for v in node.operands]
                for left, right in itertools.permutations(roots, 2):
                    extremes = (i for i in left if self.ops[i].op in operations.EXTREMES)
                    yield from (i for i in extremes if not right.isdisjoint(args[i]))

    def _cotangent_bytes(self) -> list[int]:
        """Returns the bytes of cotangents that are alive while each node is pulled back.

        The cotangent of a value is alive from the backward step of the value's last reader, the
        first step to add to the cotangent, to the backward step of its producer. Cotangents of
        arguments, and of reshaped arguments, do not count: they are alive in every plan.
        """
        arguments = {*self.graph.inputs, *self.graph.constants}
        for node in self.graph.nodes:
            if node.op in operations.RESHAPES and arguments.issuperset(node.operands):
                arguments.update(node.outputs)
        first = {v: i for i, node in enumerate(self.graph.nodes) for v in node.outputs}
        readers = ((i, node) for i, node in enumerate(self.graph.nodes) if node in self.reads)
        last = {v: i for i, node in readers for v in node.operands}
        outputs = (v for v in self.graph.outputs if isinstance(v, Value))
        last |= dict.fromkeys(outputs, len(self.graph.nodes))
        counted = (v for v in self.active if v in last and v not in arguments)
        spans = ((first[v], last[v], nbytes(v.aval)) for v in counted)
        live = alive(spans, len(self.graph.nodes))
        return [
            size + (self.working_bytes(node) if node in self.reads else 0)
            for size, node in zip(live, self.graph.nodes, strict=True)
        ]

    def working_bytes(self, node: Node) -> int:
        """Returns the bytes that the backward pass of a loop or a recomputed region needs inside:
        the bytes of one iteration with everything kept."""
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
        """Returns the peak of a region with nothing recomputed."""
        if region not in self.region_peaks:
            try:
                body = flatten(region)
                is_scan = node.primitive is _jax.SCAN
                active = active_in_body(node, body, self.active) if is_scan else None
                inside = model(body, active=active, residuals=self.residuals)
                self.region_peaks[region] = keep_all(inside).peak
            except ValueError:  # the region has no gradient by itself
                self.region_peaks[region] = 0
        return self.region_peaks[region]


def cotangents_around(node: Node, region: Graph, active: Collection[Value]) -> int:
    """Returns the bytes of cotangents that are counted both inside a region and around its node.
    For a scan, these are the cotangents of the carry, which the scan updates in place."""
    pairs = list(zip(region.outputs, node.outputs, strict=False))
    if node.primitive is _jax.SCAN:
        pairs = pairs[: _jax.scan_split(node.params)[1]]
    both = {inner for inner, outer in pairs if isinstance(inner, Value) and outer in active}
    return sum(nbytes(v.aval) for v in both)


def handed_bytes(scan: Node) -> int:
    """Returns the bytes of an iteration's own copies: its slices, and the gradients of slices and
    constants before the scan stacks these gradients or adds them up."""
    body = scan.regions["jaxpr"]
    constants, carried = _jax.scan_split(scan.params)
    read, cut = body.inputs[:constants], body.inputs[constants + carried :]
    gradients = [v for v in (*read, *cut) if has_gradient(v)]
    return sum(nbytes(v.aval) for v in (*cut, *gradients))
