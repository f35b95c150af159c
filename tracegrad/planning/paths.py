"""Ways through a program, from cut to cut, by dynamic programming.

A label is what one such way from the beginning to a cut costs, and what it leaves in memory for the
rest.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

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


@dataclass
class Labels:
    """Prefixes that end at one cut, one row for each.

    `held[l, j]`: bytes that it keeps during the backward pass of a part from here to cut j;
    `kept`: during the forward pass. `last`: where it came from: cut, row there, and the way for
    the part between.
    """

    flops: np.ndarray
    kept: np.ndarray
    held: np.ndarray
    last: np.ndarray

    def __getitem__(self, rows: Sequence[int] | np.ndarray) -> Labels:
        return Labels(*(column[rows] for column in _columns(self)))

    def __len__(self) -> int:
        return len(self.flops)


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
        if final is None:
            return None
        row: int = np.lexsort((final.kept, final.flops))[0].item()
        segments: list[Segment] = []
        i = len(self.cuts) - 1
        while i > 0:
            labels = at[i]
            assert labels is not None
            before, row, chosen = labels.last[row].tolist()
            segments.append(self.choices[before, i].ways[chosen].shifted(self.cuts[before]))
            i = before
        return segments[::-1]

    def _run(self, budget: int) -> list[Labels | None]:
        """The labels of every cut; None where none is within the budget."""
        count = len(self.cuts) - 1
        gathered = [self.model.gathered[cut - 1] for cut in self.cuts]
        nothing = np.zeros(1)
        at: list[Labels | None] = [None] * (count + 1)
        start = np.zeros((1, count + 1)), np.zeros((1, 3), np.int64)
        at[0] = Labels(nothing, nothing, *start)
        found: list[list[Labels]] = [[] for _ in self.cuts]
        for i in range(count + 1):
            if found[i]:
                labels = Labels(
                    *(np.concatenate(c) for c in zip(*map(_columns, found[i]), strict=True))
                )
                at[i] = labels[frontier(labels.flops, labels.kept, TUNING.labels)]
                found[i] = []
            here = at[i]
            if here is None:
                continue
            for j in range(i + 1, count + 1):
                if (i, j) not in self.choices:
                    continue
                flops, forward, backward, _ = self.choices[i, j].table.T
                above = gathered[j] - gathered[count]
                forwards = here.kept[:, None] + forward
                backwards = here.held[:, j][:, None] + backward + above
                rows, ways = np.nonzero((forwards <= budget) & (backwards <= budget))
                if not len(rows):
                    continue
                delta = self._deltas(i, j)
                found[j].append(
                    Labels(
                        here.flops[rows] + flops[ways],
                        here.kept[rows] + delta[ways, -1],
                        here.held[rows] + delta[ways, :-1],
                        np.column_stack([np.full(len(rows), i), rows, ways]),
                    )
                )
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


def _columns(labels: Labels) -> list[np.ndarray]:
    return [getattr(labels, f.name) for f in fields(labels)]


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
    is_new = np.concatenate([[True], smallest[1:] < smallest[:-1]])
    chosen = order[is_new]
    if len(chosen) > most:
        low, high = size[chosen].min(), size[chosen].max()
        bucket = np.floor((size[chosen] - low) / (high - low) * (most - 1e-9)).astype(int)
        # The least FLOPs of each bucket, which come first, and the fewest bytes of all.
        _, firsts = np.unique(bucket, return_index=True)
        chosen = chosen[sorted({*firsts.tolist(), len(chosen) - 1})]
    return [int(k) for k in chosen]
