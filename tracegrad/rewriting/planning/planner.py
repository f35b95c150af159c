"""The plan within a budget that computes the least again.

1. Places to cut a program are where few bytes go from one side to the other.
2. For the segment between any two of them, save sets by minimum cuts at all prices of a byte
   (`cuts.Network.hull`); segments that are alike are solved once.
3. Dynamic programming from the first to the last operation chooses segments and save sets: a label
   is what one such choice for a prefix costs and what it leaves in memory for the rest.
4. Local search on the winner saves and frees single values.

Everything is deterministic. Programs of a few operations are solved exactly: all cuts, all save
sets, and only labels dropped that another is at least as good as in every respect.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from tracegrad.rewriting.planning.cuts import Network
from tracegrad.rewriting.planning.model import MemoryModel
from tracegrad.rewriting.planning.simulation import (
    Local,
    Piece,
    Segment,
    Simulation,
    simulate,
)

EXACT = 14  # operations up to which all plans are compared
MOST_CUTS = 40
LONGEST = 20  # cuts that one recomputed segment may span
SIDEWAYS = 0.05  # bytes across that a cut may have more for a byte nearer to the middle
MOST_SAVE_SETS = 7
MOST_FREE_SAVE_SETS = 2
MOST_LABELS = 40

Progress = Callable[[float], None]  # told the share that is done


class BudgetTooSmall(ValueError):
    """No plan was found within the budget.

    Attributes:
      lowest: bytes, the lowest peak that a plan was found for.
      bound: bytes, below which no plan can be.
    """

    def __init__(self, message: str, lowest: int, bound: int):
        super().__init__(message)
        self.lowest, self.bound = lowest, bound


@dataclass(frozen=True)
class _Choices:
    """The ways to run segments that are alike, one row of the table for each.

    `saved` counts from the segment's start; None: it is not recomputed. The columns of `table` are
    the extra FLOPs, the bytes of the forward and of the backward peak, and those that stay for the
    segment's backward pass. `leaves[k]` has the values that others read and the choice does not
    keep for itself.
    """

    saved: list[frozenset[int] | None]
    table: np.ndarray
    leaves: list[tuple[int, ...]]


@dataclass
class _Labels:
    """Prefixes that end at one cut, one row for each.

    `held[l, j]`: bytes that it keeps during the backward pass of a segment from here to cut j;
    `kept`: during the forward pass. `last`: where it came from: cut, row there, and the choice for
    the segment between.
    """

    flops: np.ndarray
    kept: np.ndarray
    held: np.ndarray
    last: np.ndarray


class Planner:
    """Plans for one program, for any number of budgets."""

    def __init__(self, model: MemoryModel, progress: Progress = lambda share: None):
        self.model = model
        self.exact = len(model) <= EXACT
        self.cuts = self._places()
        self._alike: dict[Hashable, _Choices] = {}
        self._left: dict[tuple[int, int], np.ndarray] = {}
        self._tokens = _tokens(model)
        self._choices: dict[tuple[int, int], _Choices] = {}
        pairs = [(i, j) for i in range(len(self.cuts) - 1) for j in range(i + 1, len(self.cuts))]
        for done, (i, j) in enumerate(pairs):
            is_short = self.exact or j - i <= LONGEST
            self._choices[i, j] = self._choices_of(self.cuts[i], self.cuts[j], is_short)
            progress((done + 1) / len(pairs))

    # --------------------------------------------------------------------------------- segments

    def _places(self) -> list[int]:
        """The operations before which a segment may begin, and the end."""
        model = self.model
        count = len(model)
        allowed = [i for i in range(1, count) if model.cuts[i] is not None]
        if self.exact or len(allowed) <= MOST_CUTS:
            return [0, *allowed, count]
        crossing = crossing_bytes(model)
        before = [0, *itertools.accumulate(model.sizes)]
        # The longest piece, by bytes, is cut where the fewest go across, near the middle if many
        # places are alike: in a program of layers, first between these, then inside them.
        chosen = {0, count}
        pieces = [(-before[count], 0, count)]
        while pieces and len(chosen) < MOST_CUTS + 2:
            _, start, stop = heapq.heappop(pieces)
            places = [i for i in allowed if start < i < stop]
            if not places:
                continue
            middle = (before[start] + before[stop]) / 2
            place = min(places, key=lambda i: crossing[i] + abs(before[i] - middle) * SIDEWAYS)
            chosen.add(place)
            for left, right in ((start, place), (place, stop)):
                heapq.heappush(pieces, (before[left] - before[right], left, right))
        return sorted(chosen)

    def _choices_of(self, start: int, stop: int, recompute: bool) -> _Choices:
        """The ways to run a segment, none of which another is as good as in every respect.

        `recompute`: whether to look for ways that recompute.
        """
        key = (recompute, *self._tokens[start:stop])
        if key not in self._alike:
            piece = Piece(self.model, start, stop)
            if not recompute or any(self.model.fixed[start:stop]):
                saves = []
            else:
                saves = self._all_save_sets(piece) if self.exact else self._saves(piece)
            runs: list[tuple[frozenset[int] | None, Local]] = [
                (None, piece.run(False, frozenset()))
            ]
            runs += [(saved, piece.run(True, saved)) for saved in saves]
            rows = []
            for _, local in runs:
                staying = local.extra + sum([piece.sizes[v] for v in local.stored])
                rows.append([local.flops, local.forward_peak, local.backward_peak, staying])
            table = np.array(rows, float)
            compared = table
            if self.exact:  # what others read and it does not keep itself is there for some only
                left = [self._left_by(start, stop, local) for _, local in runs]
                compared = np.column_stack([table, table[:, 3:] + np.array(left, float)])
            chosen = _pareto(compared)
            leaving = [v for v, leaves in enumerate(piece.leaves) if leaves and piece.sizes[v]]
            self._alike[key] = _Choices(
                [runs[k][0] for k in chosen],
                table[chosen],
                [tuple(v for v in leaving if v not in runs[k][1].stored) for k in chosen],
            )
        return self._alike[key]

    def _saves(self, piece: Piece) -> list[frozenset[int]]:
        must_run = [i for i, size in enumerate(piece.extra) if size]
        leaves = [v for v, leaves in enumerate(piece.leaves) if leaves]
        found = Network(piece, piece.needed, must_run).hull(MOST_SAVE_SETS)
        # What others keep alive anyway costs nothing to save.
        found += Network(piece, piece.needed, must_run, leaves).hull(MOST_FREE_SAVE_SETS)
        return list(dict.fromkeys(cut.saved for cut in found))

    def _left_by(self, start: int, stop: int, local: Local) -> list[int]:
        """For every later operation the bytes that wait for it or for one before it."""
        left = [0] * (len(self.model) - stop)
        for v in range(start, stop):
            first = next((u for u in self.model.uses[v] if u >= stop), None)
            if first is not None and v - start not in local.stored:
                left[first - stop] += self.model.sizes[v]
        return list(itertools.accumulate(left)) or [0]

    def _all_save_sets(self, piece: Piece) -> list[frozenset[int]]:
        values = sorted(piece.run(True, frozenset()).recomputed)  # no other is ever read
        return [
            frozenset(saved)
            for size in range(len(values) + 1)
            for saved in itertools.combinations(values, size)
        ]

    # ------------------------------------------------------------------------ dynamic programming

    def best(self, budget: int) -> list[Segment] | None:
        """The plan with the least extra FLOPs whose peak is within `budget` bytes, before local
        search; None if none was found."""
        cuts, model = self.cuts, self.model
        count = len(cuts) - 1
        labels: list[list[tuple[np.ndarray, ...]]] = [[] for _ in cuts]
        at: list[_Labels | None] = [None] * len(cuts)
        at[0] = _Labels(
            np.zeros(1), np.zeros(1), np.zeros((1, count + 1)), np.zeros((1, 3), np.int64)
        )
        for i in range(count):
            if i:
                at[i] = self._pruned(labels[i], i)
            here = at[i]
            if here is None:
                continue
            for j in range(i + 1, count + 1):
                choices = self._choices[i, j]
                flops, forward, backward, _ = choices.table.T
                room = budget - model.gathered[cuts[j] - 1]
                fits = (here.kept[:, None] + forward <= budget) & (
                    here.held[:, j][:, None] + backward <= room
                )
                rows, chosen = np.nonzero(fits)
                if not len(rows):
                    continue
                delta = self._deltas(i, j)
                labels[j].append(
                    (
                        here.flops[rows] + flops[chosen],
                        here.kept[rows] + delta[chosen, -1],
                        here.held[rows] + delta[chosen],
                        np.column_stack([np.full(len(rows), i), rows, chosen]),
                    )
                )
        final = self._pruned(labels[count], count)
        if final is None:
            return None
        at[count] = final
        # Of equal FLOPs the one that keeps least.
        row: int = np.lexsort((final.kept, final.flops))[0].item()
        plan: list[Segment] = []
        i = count
        while i > 0:
            labels_here = at[i]
            assert labels_here is not None
            before, row, chosen = labels_here.last[row].tolist()
            plan.append(self._segment(before, i, chosen))
            i = before
        return plan[::-1]

    def _deltas(self, i: int, j: int) -> np.ndarray:
        """For each choice of a segment the bytes that it leaves for the backward pass of a segment
        that ends at each of the cuts. (Read by nobody before it, a value is not there any more.)"""
        choices, start = self._choices[i, j], self.cuts[i]
        if (i, j) not in self._left:
            delta = np.repeat(choices.table[:, 3:4], len(self.cuts), axis=1)
            for k, leaves in enumerate(choices.leaves):
                for v in leaves:
                    first = next(u for u in self.model.uses[start + v] if u >= self.cuts[j])
                    delta[k, bisect.bisect_right(self.cuts, first) :] += self.model.sizes[start + v]
            self._left[i, j] = delta
        return self._left[i, j]

    def _segment(self, i: int, j: int, chosen: int) -> Segment:
        saved, start = self._choices[i, j].saved[chosen], self.cuts[i]
        if saved is None:
            return Segment(start, self.cuts[j])
        return Segment(start, self.cuts[j], True, frozenset(v + start for v in saved))

    def _pruned(self, found: list[tuple[np.ndarray, ...]], cut: int) -> _Labels | None:
        if not found:
            return None
        flops, kept, held, last = (np.concatenate([label[k] for label in found]) for k in range(4))
        if self.exact:
            chosen = _pareto(np.column_stack([flops, kept, held[:, cut + 1 :]]))
        else:
            chosen = _frontier(flops, kept, MOST_LABELS)
        return _Labels(flops[chosen], kept[chosen], held[chosen], last[chosen])

    # ------------------------------------------------------------------------------------- plans

    def plan(self, budget: int) -> tuple[list[Segment], Simulation]:
        """The best plan found within a budget in bytes.

        Raises BudgetTooSmall if there is none.
        """
        nothing = [Segment(0, len(self.model))]
        if simulate(self.model, nothing).peak <= budget:
            return nothing, simulate(self.model, nothing)
        plan = self.best(budget)
        if plan is None:
            lowest, bound = self.lowest_peak(), lowest_peak_bound(self.model)
            raise BudgetTooSmall(
                f"a memory budget of {budget:,} bytes is too small: the lowest peak that was found "
                f"is {lowest:,} bytes, and none below {bound:,} bytes is possible",
                lowest,
                bound,
            )
        if not self.exact:
            plan = improve(self.model, plan, budget)
        return plan, simulate(self.model, plan)

    def lowest_peak(self) -> int:
        """The lowest peak, in bytes, for which `plan` finds a plan (to a hundredth)."""
        low = lowest_peak_bound(self.model)
        nothing = simulate(self.model, [Segment(0, len(self.model))]).peak
        high = nothing
        while high - low > max(0 if self.exact else nothing // 500, 0) and low < high:
            middle = (low + high) // 2
            plan = self.best(middle)
            if plan is None:
                low = middle + 1
            else:
                high = simulate(self.model, plan).peak
        return high


def _pareto(table: np.ndarray) -> list[int]:
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


def _frontier(flops: np.ndarray, size: np.ndarray, most: int) -> list[int]:
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


def crossing_bytes(model: MemoryModel) -> list[int]:
    """For each operation the bytes of earlier buffers that it or a later one reads."""
    changes = [0] * (len(model) + 1)
    for v, uses in enumerate(model.uses):
        if uses and uses[-1] > v:
            changes[v + 1] += model.sizes[v]
            changes[uses[-1] + 1 if uses[-1] + 1 <= len(model) else -1] -= model.sizes[v]
    return list(itertools.accumulate(changes[:-1]))


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
            tuple(i - v for v in model.args[i]),
            tuple(i - v for v in model.needs[i]),
            tuple(u - i for u in model.uses[i]),
        )
        tokens.append(seen.setdefault(token, len(seen)))
    return tokens


# ---------------------------------------------------------------------------------- local search


def improve(
    model: MemoryModel, plan: Sequence[Segment], budget: int, tries: int = 400
) -> list[Segment]:
    """Saves single values for which there is room, those first that spare the most FLOPs a byte,
    and frees others for them; at most `tries` plans are tried."""
    best = list(plan)
    known: dict[Segment, Local] = {}
    now = simulate(model, best, known)
    refused: set[tuple[int, int]] = set()
    for _ in range(tries):
        move = None
        candidates = [
            (model.flops[v] / (model.sizes[v] + 1), -v, k)
            for k, local in enumerate(now.locals)
            if best[k].recompute
            for v in local.recomputed
            if (k, v) not in refused
        ]
        if not candidates:
            break
        _, negative, k = max(candidates)
        v = -negative
        segment = best[k]
        changed = Segment(segment.start, segment.stop, True, segment.saved | {v})
        move = [*best[:k], changed, *best[k + 1 :]]
        then = simulate(model, move, known)
        if then.peak <= budget and then.flops < now.flops:
            best, now = move, then
        else:
            refused.add((k, v))
    return best


# ----------------------------------------------------------------------------------- lower bounds


def lowest_peak_bound(model: MemoryModel) -> int:
    """Bytes that any plan needs: what one step of the backward pass reads and writes."""
    return max(
        (
            sum(model.sizes[v] for v in model.needs[i])
            + model.cotangents[i]
            + model.gathered[i]
            + model.extra[i]
            for i in range(len(model))
        ),
        default=0,
    )


def flops_bound(model: MemoryModel, budget: int, moments: int = 4) -> int:
    """Extra FLOPs that any plan within a budget (bytes) needs.

    At any step of the backward pass what is alive fits the budget. What is needed from there on and
    is not alive must be run again. The cheapest choice is a knapsack problem; for every price of a
    byte, the minimum cut less the price of the budget is at most its value (Lagrange).
    """
    count = len(model)
    best = 0.0
    for at in sorted({count - 1 - count * k // (2 * moments) for k in range(moments)}):
        room = budget - model.cotangents[at] - model.gathered[at]
        needed = {v for i in range(at + 1) for v in model.needs[i]}
        if room < 0 or not needed:
            continue
        network = Network(model, needed)
        low, high = 0.0, None
        price = 2.0 * network.flops / max(1, room)
        # The bound is concave in the price; its slope is the bytes saved less the room.
        for _ in range(24):
            cut = network.cut(price)
            best = max(best, cut.value - price * room)
            if cut.bytes > room:
                low = price
                price = price * 4 if high is None else (low + high) / 2
            elif cut.bytes < room:
                high = price
                price = (low + high) / 2
            else:
                break
    return int(best)
