"""Finds the plan within a budget that recomputes the least.

1. A program may be cut at places where few bytes cross from one side to the other. A *part* is the
   operations between two cuts.
2. A *way* is one choice for a part, as one segment: keep it, or recompute it with a save set. The
   save sets come from minimum cuts at all prices of a byte (`cuts.find_hulls`). Equal parts are
   solved once.
3. Dynamic programming from the first to the last cut chooses one way for each part. A *label* is a
   row of numbers for one sequence of ways up to a cut: their cost, and the bytes that they leave in
   memory for the rest.

Everything is deterministic.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracegrad.planning.cuts import Network, SaveSet, find_hulls
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.simulation import Local, Piece, Segment, keep_all
from tracegrad.planning.spans import alive
from tracegrad.planning.tuning import TUNING


@dataclass(frozen=True)
class _Ways:
    """The ways to run a part (or equal parts) of a program; each has a row in `table`.

    The segments count positions from the start of the part. The columns of `table` are the extra
    FLOPs, the bytes of the forward peak and of the backward peak, and the bytes kept for the part's
    backward pass. `leaves[k]` has the values that later parts read, but that way `k` does not keep
    for its own backward pass.
    """

    segments: list[Segment]
    table: np.ndarray
    leaves: list[tuple[int, ...]]

    @functools.cached_property
    def is_recomputed(self) -> np.ndarray:
        return np.array([segment.recompute for segment in self.segments])


# The columns of a label: the FLOPs; the bytes that are kept during the forward pass; the label that
# it extends (the cut, the row at that cut, and the way for the part between); the bytes by which
# its recomputed segments exceed `careful` ** 2 of the budget, summed; and, for each later cut, the
# bytes that are kept during the backward pass of a part that ends at that cut.
_FLOPS, _KEPT, _FROM, _NEAR, _HELD = 0, 1, slice(2, 5), 5, 6


class Planner:
    def __init__(self, model: MemoryModel):
        self.model = model

    def find(self, budget: int) -> list[Segment] | None:
        """Returns the plan with the least extra FLOPs whose peak is within `budget` bytes, or None.
        Of plans with equal FLOPs, the planner prefers the plan that keeps least, then the plan
        whose recomputed segments stay farthest below the budget, since XLA may hold more for any
        segment."""
        labels = self._compute_labels(budget)
        if not len(labels[-1]):
            return None
        segments, i, row = list[Segment](), len(self._cuts) - 1, 0  # row 0 costs the least
        while i > 0:
            before, row, chosen = labels[i][row, _FROM].astype(int).tolist()
            way = self._parts[before, i][0].segments[chosen]
            segments.insert(0, way.shifted(self._cuts[before]))
            i = before
        return segments

    def lowest_peak(self) -> int:
        """Returns the lowest budget, in bytes, for which `find` has a plan, exact to 1/5000 of the
        peak with everything kept. This is enough: XLA's bytes differ by some per cent anyway."""
        peak = keep_all(self.model).peak
        budgets = range(0, peak, max(1, peak // 5000))
        lowest = bisect.bisect_left(
            budgets, True, key=lambda size: len(self._compute_labels(size)[-1]) > 0
        )
        return budgets[lowest] if lowest < len(budgets) else peak

    def _compute_labels(self, budget: int) -> list[np.ndarray]:
        """Returns the undominated labels of every cut, at most `TUNING.labels` for each."""
        labels = [np.zeros((1, _HELD + len(self._cuts)))]  # the first cut has one label
        for j in range(1, len(self._cuts)):
            before = [i for i in range(j) if (i, j) in self._parts and len(labels[i])]
            table = np.concatenate(
                [np.zeros((0, _HELD)), *(self._extend(labels[i], i, j, budget) for i in before)]
            )
            table = table[np.argsort(table[:, _NEAR], kind="stable")]  # of equals the first stays
            table = table[frontier(table[:, _FLOPS], table[:, _KEPT], TUNING.labels)]
            origins = table[:, _FROM].astype(int).tolist()
            held = [labels[i][k, _HELD:] + self._parts[i, j][1][way, :-1] for i, k, way in origins]
            labels.append(np.hstack([table, np.reshape(held, (-1, len(self._cuts)))]))
        return labels

    def _extend(self, table: np.ndarray, i: int, j: int, budget: int) -> np.ndarray:
        """Returns the columns before `_HELD` of the labels of cut `i` extended to cut `j`."""
        part, deltas = self._parts[i, j]
        flops, forward, backward, _ = part.table.T
        most = np.maximum(table[:, _KEPT, None] + forward, table[:, _HELD + j, None] + backward)
        rows, ways = np.nonzero(most <= budget)
        excess = np.maximum(most[rows, ways] - TUNING.careful**2 * budget, 0)
        return np.column_stack(
            [
                table[rows, _FLOPS] + flops[ways],
                table[rows, _KEPT] + deltas[ways, -1],
                np.full(len(rows), i),
                rows,
                ways,
                table[rows, _NEAR] + part.is_recomputed[ways] * excess,
            ]
        )

    @functools.cached_property
    def _parts(self) -> dict[tuple[int, int], tuple[_Ways, np.ndarray]]:
        """Maps the two cuts of each part that may be a segment to its ways and a table of bytes.

        The table has a row for each way. Entry ``j`` is the bytes that the way leaves in memory
        during the backward pass of a part that ends at cut ``j``; a value that no operation before
        cut ``j`` reads is not in memory then. The last entry is the bytes that the way leaves in
        the forward pass.
        """
        pairs = [
            (i, j)
            for i, j in itertools.combinations(range(len(self._cuts)), 2)
            if j - i <= TUNING.longest
        ]
        tables = {}
        all_ways = self._find_ways([(self._cuts[i], self._cuts[j]) for i, j in pairs])
        for (i, j), ways in zip(pairs, all_ways, strict=True):
            start, stop = self._cuts[i], self._cuts[j]
            held = np.repeat(ways.table[:, 3:4], len(self._cuts) + 1, axis=1)
            for k, v in ((k, v) for k, leaves in enumerate(ways.leaves) for v in leaves):
                first = next(u for u in self.model.uses[start + v] if u >= stop)
                held[k, bisect.bisect_right(self._cuts, first) :] += self.model.sizes[start + v]
            tables[i, j] = ways, held
        return tables

    @functools.cached_property
    def _cuts(self) -> tuple[int, ...]:
        """The operations at which a segment may begin, and the end of the program."""
        stop = len(self.model)
        if stop <= TUNING.cuts + 1:
            return tuple(range(stop + 1))
        # The longest piece, by bytes, is cut where the fewest bytes cross, and near the middle if
        # many places are equal: a program of layers is first cut between layers, then inside them.
        crossing, before = crossing_bytes(self.model), [0, *itertools.accumulate(self.model.sizes)]
        chosen, pieces = {0, stop}, [(-before[stop], 0, stop)]
        while pieces and len(chosen) < TUNING.cuts + 2:
            _, first, last = heapq.heappop(pieces)
            middle = (before[first] + before[last]) / 2
            off = {i: TUNING.sideways * abs(before[i] - middle) for i in range(first + 1, last)}
            if off:
                place = min(off, key=lambda i: crossing[i] + off[i])
                chosen.add(place)
                for ends in ((first, place), (place, last)):
                    heapq.heappush(pieces, (before[ends[0]] - before[ends[1]], *ends))
        scans = {i for i in range(stop) if self._step_indices(i, i + 1)}
        return tuple(sorted({0, stop, *chosen, *scans, *(i + 1 for i in scans)}))

    def _find_ways(self, parts: Sequence[tuple[int, int]]) -> list[_Ways]:
        """Returns, for each part, the undominated ways to run the part as one segment. Equal parts
        are solved once."""
        pieces = [
            tuple(Piece(self.model.steps[k], *part) for k in (0, *self._step_indices(*part)))
            for part in parts
        ]
        alike = list(dict.fromkeys(pieces))
        cuts = find_hulls([network_of(piece) for piece, *_ in alike], TUNING.save_sets)
        ways = {each: _run_ways(each, sets) for each, sets in zip(alike, cuts, strict=True)}
        return [ways[each] for each in pieces]

    def _step_indices(self, start: int, stop: int) -> range:
        """Returns the indices of the model's `steps`, except the first, in which a part may run."""
        count, scans = len(self.model.steps), self.model.steps[-1].scans
        has_scans = any(node in scans for node in self.model.nodes[start:stop])
        return range(1, count if has_scans else 1)


def _run_ways(pieces: Sequence[Piece], cuts: Iterable[SaveSet]) -> _Ways:
    """`pieces`: one part of the program in each of the model's `steps` in which it may run."""
    piece = pieces[0]
    ways = [Segment(0, len(piece.sizes)), *(() if piece.is_fixed else recomputing(piece, cuts))]
    runs = [
        (replace(way, step=step), each.run(way)) for step, each in enumerate(pieces) for way in ways
    ]
    table = np.array([_way_costs(local) for _, local in runs], float)
    chosen = pareto(table)
    return _Ways(
        [runs[k][0] for k in chosen],
        table[chosen],
        [tuple(piece.leaving(runs[k][1].stored)) for k in chosen],
    )


def _way_costs(local: Local) -> list[int]:
    """Returns a row of `_Ways.table`."""
    backward, staying = max(local.backward) - local.unread, local.staying - local.unread
    return [local.flops, max(local.forward), backward, staying]


def network_of(piece: Piece) -> Network:
    """Returns the network whose minimum cuts are save sets of a recomputed piece."""
    count = len(piece.sizes)
    must_run = [i for i, size in enumerate(piece.extra) if size]
    # If only recomputed operations read an input of the piece, the input must be kept for them.
    args = [*map(list, piece.args), *([] for _ in piece.forward_inputs)]
    for k, (_, readers) in enumerate(piece.forward_inputs):
        for i in readers:
            args[i].append(count + k)
    sizes = [*piece.sizes, *(size for size, _ in piece.forward_inputs)]
    flops = [*piece.flops, *[math.inf] * len(piece.forward_inputs)]
    return Network(sizes, flops, args, piece.needed, must_run)


def recomputing(piece: Piece, cuts: Iterable[SaveSet]) -> list[Segment]:
    """Returns the segments that recompute a piece, one for each save set."""
    count = len(piece.sizes)
    saved = ([v for v in cut.saved if v < count] for cut in cuts)
    return [Segment(0, count, True, frozenset(values)) for values in saved]


def crossing_bytes(model: MemoryModel) -> list[int]:
    """Returns for each operation the bytes of earlier buffers that it, or a later one, reads."""
    ends = [uses[-1] if uses else v for v, uses in enumerate(model.uses)]
    spans = zip(range(1, len(model) + 1), ends, model.sizes, strict=True)
    return alive((span for span in spans if span[1] >= span[0]), len(model))


def pareto(table: np.ndarray) -> list[int]:
    """Returns the undominated rows: no other row is as small in every column. The rows are sorted
    by the columns, the first column first; of equal rows, the first is returned."""
    order = np.lexsort(table.T[::-1])
    chosen: list[int] = []
    kept = np.empty((0, table.shape[1]))
    for k in order:
        if not len(kept) or not np.any(np.all(kept <= table[k], axis=1)):
            chosen.append(int(k))
            kept = np.vstack([kept, table[k]])
    return chosen


def frontier(flops: np.ndarray, size: np.ndarray, limit: int) -> list[int]:
    """Returns at most `limit` rows of fewer and fewer bytes for more and more FLOPs. If there are
    more such rows, the returned rows are spread evenly over the bytes."""
    order = np.lexsort((size, flops))
    smallest = np.minimum.accumulate(size[order])
    is_new = smallest < np.concatenate([[np.inf], smallest])[:-1]
    chosen = order[is_new]
    if len(chosen) > limit:
        low, high = size[chosen].min(), size[chosen].max()
        bucket = np.floor((size[chosen] - low) / (high - low) * (limit - 1e-9)).astype(int)
        # The row with the least FLOPs of each bucket, and the row with the fewest bytes.
        _, firsts = np.unique(bucket, return_index=True)
        chosen = chosen[sorted({*firsts.tolist(), len(chosen) - 1})]
    return [int(k) for k in chosen]
