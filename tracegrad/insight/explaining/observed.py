"""A graph and the statistics measured in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracegrad.insight.explaining.detail import Detail
from tracegrad.insight.explaining.statistics import NORM
from tracegrad.ir import Graph, Node, Occurrence, Origin
from tracegrad.ir.occurrence import Path

# Identifies a statistic: its kind, the node, and the index of the node's result or operand. Kinds:
#   "value", "ct": a result of the node; the cotangent of a result
#   "edge": the cotangent that the node's VJP gives to an operand (before other uses are added)
#   "carry": the cotangent of a carry of a scan, step by step
#   "branch": which branch of a cond ran
#   "rule": a custom rule's gradient and the derivative of its function
#   "amplified": the cotangent of an operand that a normalisation scales
#   "input", "output", "source": an input or output of the graph, the gradient of an input (no node)
# "input" is not measured with `Detail.FEW`; "value" and "edge" are measured with `Detail.ALL`, and
# with `Detail.BAD` where the runs of operations return NaN or Inf.
Key = tuple[str, Occurrence | None, int]


@dataclass(frozen=True)
class Observed:
    """A graph and the statistics measured in it, with some `detail`.

    `stats` has the statistics, `refused` the nodes that JAX cannot differentiate, with JAX's
    message, and `lines` the line that makes a NaN or Inf in the backward of a rule. Inside of scans
    the first axes of a statistic are the steps, those of the outermost scan first.
    """

    graph: Graph
    detail: Detail
    stats: Mapping[Key, np.ndarray[Any, Any]]
    refused: Mapping[Occurrence, str]
    lines: Mapping[Occurrence, Origin]

    def region(self, path: Path) -> Graph:
        """Returns the region at the end of a path."""
        return path[-1][0].region(path[-1][1]) if path else self.graph

    def get(self, kind: str, place: Place, k: int = 0) -> np.ndarray[Any, Any] | None:
        """Returns a statistic at a place; inside a scan, at the place's step (or all steps if the
        place has none)."""
        stat = self.stats.get((kind, place.occurrence, k))
        return None if stat is None else stat[place.steps]

    def of_results(self, kind: str, place: Place) -> list[np.ndarray[Any, Any] | None]:
        """Returns the statistics of the results of a node, "value" or "ct"."""
        return [self.get(kind, place, k) for k in range(len(place.node.outputs))]

    def arrives(self, place: Place, k: int | None = None) -> bool:
        """Whether a nonzero cotangent arrives at a result of a node, or at any of its results."""
        given = self.of_results("ct", place)
        chosen = given if k is None else given[k : k + 1]
        return any(ct is not None and bool(np.any(ct[..., NORM] > 0)) for ct in chosen)

    def of(self, kind: str) -> list[tuple[Occurrence, int, np.ndarray[Any, Any]]]:
        """Returns the statistics of a kind, in the order of measuring."""
        return [
            (occurrence, k, stat)
            for (its, occurrence, k), stat in self.stats.items()
            if its == kind and occurrence is not None
        ]

    def branches(self, cond: Place) -> list[str]:
        """Returns the branches of a cond that ran; inside a scan, at any of its steps."""
        index = self.get("branch", cond)
        assert index is not None
        names = list(cond.node.regions)
        ran = np.unique(index[~np.isnan(index)])  # NaN: a step at which the cond did not run
        return list(dict.fromkeys(names[int(np.clip(i, 0, len(names) - 1))] for i in ran))


@dataclass(frozen=True)
class Place:
    """An occurrence of a node, and the steps of the scans around it."""

    occurrence: Occurrence
    steps: tuple[int, ...] = ()

    @property
    def node(self) -> Node:
        return self.occurrence.node

    @property
    def path(self) -> Path:
        return self.occurrence.path

    @property
    def step(self) -> int | None:
        """The step of the outermost scan."""
        return self.steps[0] if self.steps else None


def same_place(here: Occurrence, theirs: Graph, ours: Graph, path: Path) -> Occurrence:
    """Returns the node of `ours`, the graph at the end of a path, that corresponds to a node of
    `theirs`, an equal graph."""
    for node, name in here.path:
        our_node = ours.nodes[theirs.nodes.index(node)]
        path = (*path, (our_node, name))
        theirs, ours = node.region(name), our_node.region(name)
    return Occurrence(path, ours.nodes[theirs.nodes.index(here.node)])
