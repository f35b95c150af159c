"""The plan within a budget that computes the least again.

1. Places to cut a program are where few bytes go from one side to the other.
2. For the segment between any two of them, save sets by minimum cuts at all prices of a byte
   (`cuts.Network.hull`); segments that are alike are solved once.
3. Dynamic programming from the first to the last cut chooses among all of these. A label is what
   one way to a cut costs, and what it leaves in memory for the rest: a row of numbers.

Everything is deterministic.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracegrad.planning.cuts import Cut, Network, hulls
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.simulation import Local, Piece, Segment, keep_all
from tracegrad.planning.spans import alive
from tracegrad.planning.tuning import TUNING


@dataclass(frozen=True)
class _Ways:
    """The ways to run parts of a program that are alike, one row of the table for each.

    A way is one segment, counted from the part's start. The columns of `table` are the extra FLOPs,
    the bytes of the forward and of the backward peak, and those that stay for the part's backward
    pass. `leaves[k]` has the values that others read and the way does not keep for itself.
    """

    segments: list[Segment]
    table: np.ndarray
    leaves: list[tuple[int, ...]]


# The columns of a label: the FLOPs, the bytes that are kept during the forward pass, and where it
# came from: a cut, the row there, and the way for the part between; then the bytes by which its
# recomputed segments come near to the budget, together; and, for each cut, the bytes that are kept
# during the backward pass of a part from here to that cut.
_FLOPS, _KEPT, _FROM, _NEAR, _HELD = 0, 1, slice(2, 5), 5, 6


class Planner:
    """Plans for one program, for any number of budgets."""

    def __init__(self, model: MemoryModel):
        self.model = model
        self._tokens = _tokens(model)

    def find(self, budget: int) -> list[Segment] | None:
        """The plan with the least extra FLOPs whose peak is within `budget` bytes, None if none is
        found; of equal ones that which keeps least, then that with the fewest recomputed segments
        near to the budget, since XLA may hold more of any of them."""
        at = self._labels(budget)
        if not len(at[-1]):
            return None
        segments, i, row = list[Segment](), len(self._cuts) - 1, 0  # the first costs the least
        while i > 0:
            before, row, chosen = at[i][row, _FROM].astype(int).tolist()
            way = self._parts[before, i][0].segments[chosen]
            segments.insert(0, way.shifted(self._cuts[before]))
            i = before
        return segments

    def lowest_peak(self) -> int:
        """The lowest budget, in bytes, for which `find` has a plan, to a five thousandth: what XLA
        holds of the lowest plan may be less by some per cent."""
        peak = keep_all(self.model).peak
        budgets = range(0, peak, max(1, peak // 5000))
        lowest = bisect.bisect_left(budgets, True, key=lambda size: len(self._labels(size)[-1]) > 0)
        return budgets[lowest] if lowest < len(budgets) else peak

    def _labels(self, budget: int) -> list[np.ndarray]:
        """The labels of every cut, one row for each way to it that is within `budget` bytes."""
        count = len(self._cuts)
        found = [[np.zeros((int(not i), _HELD + count))] for i in range(count)]
        at: list[np.ndarray] = []
        for i in range(count):
            here = np.concatenate(found[i])
            order = np.argsort(here[:, _NEAR], kind="stable")  # the first of equals stays
            flops, kept = here[order, _FLOPS], here[order, _KEPT]
            here = here[order[frontier(flops, kept, TUNING.labels)]]
            at.append(here)
            found[i] = []
            for j in range(i + 1, count):
                if (i, j) not in self._parts or not len(here):
                    continue
                part, deltas = self._parts[i, j]
                flops, forward, backward, _ = part.table.T
                forwards = here[:, _KEPT, None] + forward
                backwards = here[:, _HELD + j, None] + backward
                rows, ways = np.nonzero((forwards <= budget) & (backwards <= budget))
                near = np.maximum(forwards, backwards)[rows, ways] - TUNING.careful**2 * budget
                is_run_again = np.array([way.recompute for way in part.segments])
                near = here[rows, _NEAR] + is_run_again[ways] * np.maximum(near, 0)
                flops = here[rows, _FLOPS] + flops[ways]
                kept = here[rows, _KEPT] + deltas[ways, -1]
                order = np.argsort(near, kind="stable")
                best = order[frontier(flops[order], kept[order], len(order) + 1)]
                rows, ways = rows[best], ways[best]
                held = here[rows, _HELD:] + deltas[ways, :-1]
                origin = np.full(len(rows), i), rows, ways
                found[j].append(
                    np.column_stack([flops[best], kept[best], *origin, near[best], held])
                )
        return at

    @functools.cached_property
    def _parts(self) -> dict[tuple[int, int], tuple[_Ways, np.ndarray]]:
        """The ways to run the part between two cuts, for all parts that may be a segment; and for
        each way the bytes that it leaves for the backward pass of a part that ends at each of the
        cuts (read by nobody before it, a value is not there any more), and last what it leaves in
        the forward pass."""
        ends = [
            (i, j)
            for i, j in itertools.combinations(range(len(self._cuts)), 2)
            if j - i <= TUNING.longest
        ]
        found = {}
        all_ways = self._ways([(self._cuts[i], self._cuts[j]) for i, j in ends])
        for (i, j), ways in zip(ends, all_ways, strict=True):
            start, stop = self._cuts[i], self._cuts[j]
            left = np.repeat(ways.table[:, 3:4], len(self._cuts) + 1, axis=1)
            for k, v in ((k, v) for k, leaves in enumerate(ways.leaves) for v in leaves):
                first = next(u for u in self.model.uses[start + v] if u >= stop)
                left[k, bisect.bisect_right(self._cuts, first) :] += self.model.sizes[start + v]
            found[i, j] = ways, left
        return found

    @functools.cached_property
    def _cuts(self) -> tuple[int, ...]:
        """The operations before which a segment may begin, and the end."""
        stop = len(self.model)
        if stop <= TUNING.cuts + 1:
            return tuple(range(stop + 1))
        # The longest piece, by bytes, is cut where the fewest go across, near the middle if many
        # places are alike: in a program of layers, first between these, then inside them.
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
        scans = {i for i in range(stop) if self._steps(i, i + 1)}
        return tuple(sorted({0, stop, *chosen, *scans, *(i + 1 for i in scans)}))

    def _ways(self, parts: Sequence[tuple[int, int]]) -> list[_Ways]:
        """For each part the ways to run it as one segment, none of which another is as good as in
        every respect. Parts that are alike are looked at once."""
        keys = [tuple(self._tokens[start:stop]) for start, stop in parts]
        alike = dict(zip(keys, parts, strict=True))
        pieces = [Piece(self.model, start, stop) for start, stop in alike.values()]
        cuts = hulls(list(map(network_of, pieces)), TUNING.save_sets)
        found = {
            key: self._ways_of(start, stop, piece, saving)
            for (key, (start, stop)), piece, saving in zip(alike.items(), pieces, cuts, strict=True)
        }
        return [found[key] for key in keys]

    def _ways_of(self, start: int, stop: int, piece: Piece, cuts: Sequence[Cut]) -> _Ways:
        is_fixed = any(self.model.fixed[start:stop])
        ways = [Segment(0, stop - start), *(() if is_fixed else recomputing(piece, cuts))]
        runs = [(way, piece.run(way)) for way in ways]
        for step in self._steps(start, stop):
            here = Piece(self.model.steps[step], start, stop)
            runs += [(replace(way, step=step), here.run(way)) for way in ways]
        table = np.array([_costs(local) for _, local in runs], float)
        chosen = pareto(table)
        return _Ways(
            [runs[k][0] for k in chosen],
            table[chosen],
            [tuple(piece.left(runs[k][1].stored)) for k in chosen],
        )

    def _steps(self, start: int, stop: int) -> range:
        """Those of the model's steps in which a part may be run but for the first."""
        count, scans = len(self.model.steps), self.model.steps[-1].scans
        has_scans = any(node in scans for node in self.model.nodes[start:stop])
        return range(1, count if has_scans else 1)


def _costs(local: Local) -> list[int]:
    """A row of `_Ways.table`."""
    backward, staying = max(local.backward) - local.unread, local.staying - local.unread
    return [local.flops, max(local.forward), backward, staying]


def network_of(piece: Piece) -> Network:
    """The choice of what a piece saves, if it is recomputed."""
    count = len(piece.sizes)
    must_run = [i for i, size in enumerate(piece.extra) if size]
    # What came into it and is read again only where something else is run again is kept for that.
    args = [*map(list, piece.args), *([] for _ in piece.given)]
    for k, (_, readers) in enumerate(piece.given):
        for i in readers:
            args[i].append(count + k)
    sizes = [*piece.sizes, *(size for size, _ in piece.given)]
    flops = [*piece.flops, *[math.inf] * len(piece.given)]
    return Network(sizes, flops, args, piece.needed, must_run)


def recomputing(piece: Piece, cuts: Iterable[Cut]) -> list[Segment]:
    """The ways to recompute a piece, with save sets."""
    count = len(piece.sizes)
    saved = ([v for v in cut.saved if v < count] for cut in cuts)
    return [Segment(0, count, True, frozenset(values)) for values in saved]


def crossing_bytes(model: MemoryModel) -> list[int]:
    """For each operation the bytes of earlier buffers that it or a later one reads."""
    ends = [uses[-1] if uses else v for v, uses in enumerate(model.uses)]
    spans = zip(range(1, len(model) + 1), ends, model.sizes, strict=True)
    return alive((span for span in spans if span[1] >= span[0]), len(model))


def _tokens(model: MemoryModel) -> list[int]:
    """Equal numbers for operations that do the same to their surroundings."""
    seen: dict[Hashable, int] = {}
    tokens = []
    columns = model.sizes, model.flops, model.extra, model.beside, model.cotangents, model.fixed
    for i, own in enumerate(zip(*columns, strict=True)):
        token: Hashable = (
            own,
            tuple((i - v, model.sizes[v], *(i - u for u in model.uses[v])) for v in model.args[i]),
            tuple((i - v, *(i - u for u in model.uses[v])) for v in model.needs[i]),
            tuple(i - v for v in model.behind[i]),
            tuple(u - i for u in model.uses[i]),
            tuple((m.extra[i], m.again[i], m.cotangents[i], m.needs[i]) for m in model.steps[1:]),
        )
        tokens.append(seen.setdefault(token, len(seen)))
    return tokens


def pareto(table: np.ndarray) -> list[int]:
    """The rows than which no other is as small in every column, in the order of the first; of equal
    rows the first."""
    order = np.lexsort(table.T[::-1])
    chosen: list[int] = []
    kept = np.empty((0, table.shape[1]))
    for k in order:
        if not len(kept) or not np.any(np.all(kept <= table[k], axis=1)):
            chosen.append(int(k))
            kept = np.vstack([kept, table[k]])
    return chosen


def frontier(flops: np.ndarray, size: np.ndarray, most: int) -> list[int]:
    """Rows of ever fewer bytes for ever more FLOPs, at most so many, spread over the bytes."""
    order = np.lexsort((size, flops))
    smallest = np.minimum.accumulate(size[order])
    is_new = smallest < np.concatenate([[np.inf], smallest])[:-1]
    chosen = order[is_new]
    if len(chosen) > most:
        low, high = size[chosen].min(), size[chosen].max()
        bucket = np.floor((size[chosen] - low) / (high - low) * (most - 1e-9)).astype(int)
        # The least FLOPs of each bucket, which come first, and the fewest bytes of all.
        _, firsts = np.unique(bucket, return_index=True)
        chosen = chosen[sorted({*firsts.tolist(), len(chosen) - 1})]
    return [int(k) for k in chosen]
