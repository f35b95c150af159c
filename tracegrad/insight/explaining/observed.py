"""A graph and what was measured in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracegrad.ir import Graph, Node, Occurrence, Origin
from tracegrad.ir.occurrence import Path

# What a statistic describes: its kind, the node, and the number of the node's result or operand.
# The inputs and outputs of the graph itself have no node.
Key = tuple[str, Occurrence | None, int]


@dataclass(frozen=True)
class Observed:
    """A graph and what was measured in it.

    `stats` has the statistics, `refused` the nodes that JAX cannot differentiate, with JAX's words,
    and `lines` the line that makes a NaN or Inf in the backward of a rule.
    """

    graph: Graph
    stats: Mapping[Key, np.ndarray[Any, Any]]
    refused: Mapping[Occurrence, str]
    lines: Mapping[Occurrence, Origin]

    def region(self, path: Path) -> Graph:
        """The region that a path leads to."""
        return path[-1][0].region(path[-1][1]) if path else self.graph

    def get(self, kind: str, place: Place, k: int = 0) -> np.ndarray[Any, Any] | None:
        """A statistic at a place and, in a scan, at its step (all steps if it has none)."""
        stat = self.stats.get((kind, place.occurrence, k))
        return None if stat is None else stat[place.steps]

    def of(self, kind: str) -> list[tuple[Occurrence, int, np.ndarray[Any, Any]]]:
        """The statistics of a kind, in the order in which they were met."""
        return [
            (occurrence, k, stat)
            for (its, occurrence, k), stat in self.stats.items()
            if its == kind and occurrence is not None
        ]

    def branches(self, cond: Place) -> list[str]:
        """The branches of a cond that ran; inside a scan, at any of its steps."""
        index = self.get("branch", cond)
        assert index is not None
        names = list(cond.node.regions)
        ran = np.unique(index[~np.isnan(index)])  # not at a step at which the cond itself did not
        return list(dict.fromkeys(names[int(np.clip(i, 0, len(names) - 1))] for i in ran))


@dataclass(frozen=True)
class Place:
    """A node where it is met, and the steps of the scans around it."""

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
        """That of the outermost scan."""
        return self.steps[0] if self.steps else None
