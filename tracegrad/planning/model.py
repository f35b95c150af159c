"""The planner's model of a program: the bytes of every buffer, the FLOPs to compute it, and its
readers in the forward and in the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tracegrad.ir import Graph, Node, Value
from tracegrad.planning.fusion import Fusion
from tracegrad.planning.residuals import NodeResiduals, Residuals


@dataclass(frozen=True, eq=False)
class ScanWay:
    """A way to run a scan so that it keeps less for its backward pass.

    Attributes:
      program: a graph that computes the same as the scan, from the same operands.
      read: the values that the backward pass of the program reads.
      working: the bytes that the backward pass needs inside of the program.
      flops: the FLOPs that all iterations together recompute.
    """

    program: Graph
    read: Residuals
    working: int
    flops: int
    name: str


@dataclass
class MemoryModel:
    """Operations in the order of execution. Each writes one buffer; an index means both.

    Attributes (lists have an entry for each operation):
      sizes: bytes of the buffer.
      flops: FLOPs to compute the buffer from the buffers in `args`.
      args: the buffers that the operation reads.
      needs: the buffers that the operation's backward step reads, maybe also its own.
      cotangents: bytes of cotangents that are alive during the backward step in every plan.
      extra: bytes of residuals that are not buffers. Recomputing the operation computes these
        residuals again; they are kept only if its segment is not recomputed.
      beside: bytes that XLA computes from the buffers for the backward step in advance: before the
        backward pass begins or, in a recomputed segment, before the segment's backward pass.
      fixed: whether the operation, or one that follows it and writes no buffer, has effects. Its
        segment is not recomputed, since effects must not happen twice.
      nodes: the node that writes the buffer; empty for a model that was made by hand.
      graph: the modelled graph, in which calls are inlined.
      active: the values of the graph that get a cotangent.
      fusion: how XLA treats the results of each node of the graph.
      residuals: the cached residuals of nodes, to share with other models of the same nodes.
      inner_flops: FLOPs that the backward step recomputes inside of the operation in every plan.
      scans: maps each scan that runs in another way to that way.
      steps: this model, then models of the same operations in which scans keep less and less.
    """

    sizes: list[int]
    flops: list[int]
    args: list[tuple[int, ...]]
    needs: list[tuple[int, ...]]
    cotangents: list[int]
    extra: list[int] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    fixed: list[bool] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    graph: Graph | None = None
    active: Collection[Value] = ()
    fusion: Fusion = ()
    residuals: NodeResiduals = field(default_factory=NodeResiduals)
    inner_flops: list[int] = field(default_factory=list)
    scans: Mapping[Node, ScanWay] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.sizes)
        self.extra = self.extra or [0] * count
        self.beside = self.beside or [0] * count
        self.fixed = self.fixed or [False] * count
        self.inner_flops = self.inner_flops or [0] * count
        self.steps = [self]
        # For each buffer, the operations that read it in either pass, in order.
        self.uses: list[list[int]] = [[] for _ in self.sizes]
        for i, (args, needs) in enumerate(zip(self.args, self.needs, strict=True)):
            for v in {*args, *needs}:
                self.uses[v].append(i)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def total_flops(self) -> int:
        return sum(self.flops)
