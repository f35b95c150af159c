"""What a planner has to know of a program: for every buffer its bytes, what it costs to compute,
what reads it in the forward and in the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tracegrad.ir import Graph, Node, Value
from tracegrad.planning.fusion import Fusion
from tracegrad.planning.residuals import NodeResiduals, Residuals


@dataclass(frozen=True, eq=False)
class ScanWay:
    """A way to run a scan that keeps less of it.

    Attributes:
      program: what computes the same of the same operands.
      read: what its backward pass reads.
      working: bytes that this needs inside.
      flops: those that it runs again, in all.
      name: what is done, in words.
    """

    program: Graph
    read: Residuals
    working: int
    flops: int
    name: str


@dataclass
class MemoryModel:
    """Operations in the order of execution, each with one buffer; operands are positions in it.

    Attributes:
      sizes: bytes of the buffer.
      flops: FLOPs of computing it from the buffers that it reads.
      args: the buffers that it reads.
      needs: the buffers that its step of the backward pass reads (its own may be one).
      behind: those that it reads as well where its segment is kept, if they are of the segment or
        came into it: XLA computes there again, inside what reads it, what is written as well.
      cotangents: bytes of cotangents alive during its step of the backward pass, whatever the plan.
      extra: bytes that its own backward pass reads beside buffers; they are made again whenever
        the operation is recomputed, and kept only where nothing around it is.
      beside: bytes of what XLA makes of the buffers for its step before the backward pass begins,
        and keeps until then; where its segment is recomputed, before that one's begins.
      fixed: whether an operation, or one behind it that writes no buffer, has effects, which must
        not happen twice: a segment with it is not recomputed.
      nodes: the node that writes the buffer; empty for a model that was made by hand.
      graph: what was modelled, with its calls written out.
      active: the values of the graph that get a cotangent.
      fusion: what becomes of its results, where that was seen.
      residuals: what is known of its nodes, for models of much the same nodes.
      again: FLOPs that its own backward pass runs again inside, whatever the plan.
      scans: how scans are run that are not as they were.
      steps: the model itself, and of the same operations those in which scans keep ever less.
    """

    sizes: list[int]
    flops: list[int]
    args: list[tuple[int, ...]]
    needs: list[tuple[int, ...]]
    cotangents: list[int]
    behind: list[tuple[int, ...]] = field(default_factory=list)
    extra: list[int] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    fixed: list[bool] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    graph: Graph | None = None
    active: Collection[Value] = ()
    fusion: Fusion | None = None
    residuals: NodeResiduals = field(default_factory=NodeResiduals)
    again: list[int] = field(default_factory=list)
    scans: Mapping[Node, ScanWay] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.sizes)
        self.behind = self.behind or [()] * count
        self.extra = self.extra or [0] * count
        self.beside = self.beside or [0] * count
        self.fixed = self.fixed or [False] * count
        self.again = self.again or [0] * count
        self.steps = [self]
        # For each buffer the operations that read it, in either pass, in order.
        self.uses: list[list[int]] = [[] for _ in self.sizes]
        for i, (args, needs) in enumerate(zip(self.args, self.needs, strict=True)):
            for v in {*args, *needs}:
                self.uses[v].append(i)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def total_flops(self) -> int:
        return sum(self.flops)
