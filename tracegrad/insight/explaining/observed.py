"""A graph and what was measured in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracegrad import _jax
from tracegrad.insight.explaining.measuring import Key, Steps, occurrence
from tracegrad.ir import Graph, Literal, Node, Occurrence, Value


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

    def branches(self, spot: Spot) -> list[str]:
        """Of a cond the branches that ran, in a scan at any of its steps."""
        index = self.get("branch", spot)
        assert index is not None
        names = list(self.node(spot).regions)
        ran = np.unique(index[~np.isnan(index)])  # not at a step at which the cond itself did not
        return list(dict.fromkeys(names[int(np.clip(i, 0, len(names) - 1))] for i in ran))

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

    @property
    def step(self) -> int | None:
        """That of the outermost scan."""
        return self.steps[0] if self.steps else None


def call_of(at: Steps) -> Spot:
    """The node whose region a way leads to."""
    return Spot(at[:-1], at[-1][0])


def handed_on(node: Node) -> Sequence[Value | Literal]:
    """The operands that become the inputs of a node's regions: all but the index of a cond."""
    return node.inputs[1:] if node.primitive is _jax.COND else node.inputs


def inside(spot: Spot, node: Node, value: Value) -> Iterator[tuple[Steps, Value]]:
    """What an operand of a node is in its regions, each with the way there."""
    for name, region in node.regions.items():
        for operand, within in zip(handed_on(node), region.inputs, strict=False):
            if operand is value:
                yield (*spot.at, (spot.number, name)), within
