"""A graph and what was measured in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracegrad.insight.explaining.measuring import Key, Steps, occurrence
from tracegrad.ir import Graph, Node, Occurrence

NAN, INF = 2, 3  # where an exact statistic has the numbers of NaNs and Infs


@dataclass(frozen=True)
class Observed:
    """A graph and what was measured in it, by the number of its nodes."""

    graph: Graph
    stats: Mapping[Key, np.ndarray[Any, Any]]

    def get(self, kind: str, spot: Spot, k: int = 0) -> np.ndarray[Any, Any] | None:
        """A statistic at a place and, in a scan, at its step (all steps if it has none)."""
        stat = self.stats.get((kind, spot.at, spot.number, k))
        return None if stat is None else stat[spot.steps]

    def node(self, spot: Spot) -> Node:
        return occurrence(self.graph, spot.at, spot.number).node

    def occurrence(self, spot: Spot) -> Occurrence:
        return occurrence(self.graph, spot.at, spot.number)

    def region(self, at: Steps) -> Graph:
        graph = self.graph
        for number, name in at:
            graph = graph.nodes[number].region(name)
        return graph


@dataclass(frozen=True)
class Spot:
    """A node by numbers: the way to its graph, its place there, and the steps of the scans."""

    at: Steps
    number: int
    steps: tuple[int, ...] = ()
