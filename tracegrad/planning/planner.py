"""The plan within a budget that computes the least again.

1. Places to cut a program are where few bytes go from one side to the other.
2. For the segment between any two of them, save sets by minimum cuts at all prices of a byte
   (`cuts.Network.hull`); segments that are alike are solved once. Where little is run again, the
   backward pass of a segment may also go from one place inside to the next.
3. Dynamic programming from the first to the last operation (`paths`) chooses among all of these.

Everything is deterministic.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Hashable, Iterator
from dataclasses import replace

import numpy as np

from tracegrad.planning.cuts import Network
from tracegrad.planning.model import MemoryModel, alive
from tracegrad.planning.paths import Choices, Paths, pareto
from tracegrad.planning.simulation import (
    Local,
    Piece,
    Segment,
    Simulation,
    keep_all,
    plan_to_keep,
    simulate,
)
from tracegrad.planning.tuning import TUNING


class Planner:
    """Plans for one program, for any number of budgets."""

    def __init__(self, model: MemoryModel):
        self.model = model
        self.kept = keep_all(model)
        self._alike: dict[Hashable, Choices] = {}
        self._tokens = _tokens(model)

    def find(self, budget: int) -> tuple[list[Segment], Simulation] | None:
        """The best plan found within a budget in bytes; None if there is none."""
        if self.kept.peak <= budget:  # then there is nothing to plan, and no library is needed
            return plan_to_keep(self.model), self.kept
        plan = self._cheapest(budget)
        return None if plan is None else (plan, simulate(self.model, plan))

    def lowest_peak(self) -> int:
        """The lowest budget, in bytes, for which `find` has a plan.

        To a five thousandth: what XLA holds of the lowest plan may be less by some per cent.
        """
        low, high = 0, self.kept.peak
        while high - low > self.kept.peak // 5000 and low < high:
            middle = (low + high) // 2
            if self._cheapest(middle) is None:
                low = middle + 1
            else:
                high = middle
        return high

    def _cheapest(self, budget: int) -> list[Segment] | None:
        """The plan with the least extra FLOPs whose peak is within `budget` bytes; None if there is
        none."""
        return self._paths.cheapest(budget - self.model.gathered[-1])

    @functools.cached_property
    def _paths(self) -> Paths:
        cuts = self._places()
        choices: dict[tuple[int, int], Choices] = {}
        for i, j in itertools.combinations(range(len(cuts)), 2):
            if j - i <= TUNING.longest:
                is_small = cuts[j] - cuts[i] <= TUNING.most_in_pieces
                inner = tuple(cut - cuts[i] for cut in cuts[i + 1 : j]) if is_small else ()
                choices[i, j] = self._choices_of(cuts[i], cuts[j], inner)
        return Paths(self.model, cuts, choices)

    def _places(self) -> tuple[int, ...]:
        """The operations before which a segment may begin, and the end."""
        stop = len(self.model)
        if stop <= TUNING.cuts + 1:
            return tuple(range(stop + 1))
        crossing, before = crossing_bytes(self.model), [0, *itertools.accumulate(self.model.sizes)]
        # The longest piece, by bytes, is cut where the fewest go across, near the middle if many
        # places are alike: in a program of layers, first between these, then inside them.
        chosen = {0, stop}
        pieces = [(before[0] - before[stop], 0, stop)]
        while pieces and len(chosen) < TUNING.cuts + 2:
            _, first, last = heapq.heappop(pieces)
            places = range(first + 1, last)
            if not places:
                continue
            middle = (before[first] + before[last]) / 2
            off = {i: TUNING.sideways * abs(before[i] - middle) for i in places}
            place = min(places, key=lambda i: crossing[i] + off[i])
            chosen.add(place)
            for left, right in ((first, place), (place, last)):
                heapq.heappush(pieces, (before[left] - before[right], left, right))
        return tuple(sorted(chosen))

    def _choices_of(self, start: int, stop: int, inner: tuple[int, ...]) -> Choices:
        """The ways to run a part as one segment, none of which another is as good as in every
        respect.

        `inner`: places, counted from its start, between which its backward pass may go piece by
        piece.
        """
        key = (inner, *self._tokens[start:stop])
        if key not in self._alike:
            piece = Piece(self.model, start, stop)
            is_fixed = any(self.model.fixed[start:stop])
            ways = [Segment(0, stop - start), *(() if is_fixed else recomputing(piece))]
            runs = [(way, piece.run(way)) for way in ways]
            few = TUNING.cheap * sum(piece.flops)
            cheap = [way for way, local in runs[1:] if not way.offload and local.flops <= few]
            if inner and cheap:
                in_pieces = replace(cheap[-1], inner=inner)
                runs.append((in_pieces, piece.run(in_pieces)))
            table = np.array([_costs(local) for _, local in runs], float)
            chosen = pareto(table)
            leaving = [v for v, leaves in enumerate(piece.leaves) if leaves and piece.sizes[v]]
            self._alike[key] = Choices(
                [runs[k][0] for k in chosen],
                table[chosen],
                [tuple(v for v in leaving if v not in runs[k][1].stored) for k in chosen],
            )
        return self._alike[key]


def _costs(local: Local) -> list[int]:
    """A row of `Choices.table`."""
    backward, staying = local.backward_peak - local.unread, local.staying - local.unread
    return [local.flops, local.forward_peak, backward, staying]


def recomputing(piece: Piece) -> Iterator[Segment]:
    """The ways to recompute a piece: with save sets, and with the best of them on the host."""
    whole = Segment(0, len(piece.sizes), recompute=True)
    must_run = [i for i, size in enumerate(piece.extra) if size]
    network = Network(piece, piece.needed, must_run, given=piece.given)
    for cut in network.hull(TUNING.save_sets):
        yield replace(whole, saved=cut.saved)
    if piece.transfer < math.inf:
        # Where a byte costs more on the device than its way to the host, all that is saved goes.
        yield replace(whole, saved=network.cut(piece.transfer).saved, offload=True)


def crossing_bytes(model: MemoryModel) -> list[int]:
    """For each operation the bytes of earlier buffers that it or a later one reads."""
    ends = [uses[-1] if uses else v for v, uses in enumerate(model.uses)]
    spans = zip(range(1, len(model) + 1), ends, model.sizes, strict=True)
    return alive((span for span in spans if span[1] >= span[0]), len(model))


def _tokens(model: MemoryModel) -> list[int]:
    """Equal numbers for operations that do the same to their surroundings."""
    seen: dict[Hashable, int] = {}
    tokens = []
    for i in range(len(model)):
        grows = model.gathered[i] - (model.gathered[i + 1] if i + 1 < len(model) else 0)
        token = (
            model.sizes[i],
            model.flops[i],
            model.extra[i],
            model.cotangents[i],
            model.fixed[i],
            grows,
            tuple((i - v, model.sizes[v], *(i - u for u in model.uses[v])) for v in model.args[i]),
            tuple((i - v, *(i - u for u in model.uses[v])) for v in model.needs[i]),
            tuple(i - v for v in model.behind[i]),
            tuple(u - i for u in model.uses[i]),
        )
        tokens.append(seen.setdefault(token, len(seen)))
    return tokens
