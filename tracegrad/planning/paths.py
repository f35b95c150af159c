"""Ways through a program, from cut to cut, by dynamic programming.

A label is what one such way from the beginning to a cut costs, and what it leaves in memory for the
rest: a row of numbers.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracegrad.planning.model import MemoryModel
from tracegrad.planning.simulation import Segment
from tracegrad.planning.tuning import TUNING


@dataclass(frozen=True)
class Choices:
    """The ways to run parts of a program that are alike, one row of the table for each.

    A way is one segment, counted from the part's start. The columns of `table` are the
    extra FLOPs, the bytes of the forward and of the backward peak, and those that stay for the
    part's backward pass. `leaves[k]` has the values that others read and the way does not keep for
    itself.
    """

    ways: list[Segment]
    table: np.ndarray
    leaves: list[tuple[int, ...]]


# The columns of a label: the FLOPs, the bytes that are kept during the forward pass, and where it
# came from: a cut, the row there, and the way for the part between. Then, for each cut, the bytes
# that are kept during the backward pass of a part from here to that cut.
_FLOPS, _KEPT, _FROM, _HELD = 0, 1, slice(2, 5), 5


class Paths:
    """From the first of some cuts to the last, by dynamic programming.

    Args:
      model: the program.
      cuts: places in it, in order.
      choices: the ways to run the part between two cuts, for all parts that may be a segment.
    """

    def __init__(
        self, model: MemoryModel, cuts: Sequence[int], choices: Mapping[tuple[int, int], Choices]
    ):
        self.model, self.cuts, self.choices = model, cuts, choices
        self._deltas_known: dict[tuple[int, int], np.ndarray] = {}

    def cheapest(self, budget: int) -> list[Segment] | None:
        """The segments of the way of the least FLOPs within `budget` bytes, counted above what the
        gradients of arguments that wait at the last cut take; of equal FLOPs the one that keeps
        least. None if there is none."""
        at = self._run(budget)
        final = at[-1]
        if not len(final):
            return None
        row: int = np.lexsort((final[:, _KEPT], final[:, _FLOPS]))[0].item()
        segments: list[Segment] = []
        i = len(self.cuts) - 1
        while i > 0:
            before, row, chosen = at[i][row, _FROM].astype(int).tolist()
            segments.append(self.choices[before, i].ways[chosen].shifted(self.cuts[before]))
            i = before
        return segments[::-1]

    def _run(self, budget: int) -> list[np.ndarray]:
        """The labels of every cut, one row for each way to it that is within the budget."""
        count = len(self.cuts)
        gathered = [self.model.gathered[cut - 1] for cut in self.cuts]
        found = [[np.zeros((int(not i), _HELD + count))] for i in range(count)]
        at: list[np.ndarray] = []
        for i in range(count):
            here = np.concatenate(found[i])
            here = here[frontier(here[:, _FLOPS], here[:, _KEPT], TUNING.labels)]
            at.append(here)
            found[i] = []
            for j in range(i + 1, count):
                if (i, j) not in self.choices or not len(here):
                    continue
                flops, forward, backward, _ = self.choices[i, j].table.T
                above = gathered[j] - gathered[-1]
                forwards = here[:, _KEPT, None] + forward
                backwards = here[:, _HELD + j, None] + backward + above
                rows, ways = np.nonzero((forwards <= budget) & (backwards <= budget))
                delta = self._deltas(i, j)[ways]
                origin = np.column_stack([np.full(len(rows), i), rows, ways])
                flops, kept = here[rows, _FLOPS] + flops[ways], here[rows, _KEPT] + delta[:, -1]
                held = here[rows, _HELD:] + delta[:, :-1]
                found[j].append(np.column_stack([flops, kept, origin, held]))
        return at

    def _deltas(self, i: int, j: int) -> np.ndarray:
        """For each way of a part the bytes that it leaves for the backward pass of a part that ends
        at each of the cuts (read by nobody before it, a value is not there any more), and last what
        it leaves in the forward pass."""
        if (i, j) not in self._deltas_known:
            choices, start = self.choices[i, j], self.cuts[i]
            delta = np.repeat(choices.table[:, 3:4], len(self.cuts) + 1, axis=1)
            for k, leaves in enumerate(choices.leaves):
                for v in leaves:
                    first = next(u for u in self.model.uses[start + v] if u >= self.cuts[j])
                    delta[k, bisect.bisect_right(self.cuts, first) :] += self.model.sizes[start + v]
            self._deltas_known[i, j] = delta
        return self._deltas_known[i, j]


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
