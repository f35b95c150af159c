"""The plan within a budget that computes the least again.

1. Places to cut a program are where few bytes go from one side to the other.
2. For the segment between any two of them, save sets by minimum cuts at all prices of a byte
   (`cuts.Network.hull`); segments that are alike are solved once. Where little is run again, the
   backward pass of a segment may also go from one place inside to the next.
3. The part between two neighbouring places is cut once more, finely: the ways through it in several
   short segments, each of which holds little while it runs again, are ways to run that part.
4. Dynamic programming from the first to the last operation (`paths`) chooses among all of these.
5. Local search on the winner saves and frees single values.

Everything is deterministic. Programs of a few operations are solved exactly, but for backward
passes that go in pieces: all cuts, all save sets, and only labels dropped that another is at least
as good as in every respect.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np

from tracegrad.planning.bounds import lowest_peak_bound, step_bytes
from tracegrad.planning.cuts import Network
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.paths import Choices, Labels, Paths, frontier, pareto
from tracegrad.planning.simulation import (
    Local,
    Piece,
    Segment,
    Simulation,
    keep_all,
    run_segment,
    simulate,
)

EXACT = 14  # operations up to which all plans are compared
MOST_CUTS = 40
LARGE = 500  # operations: in programs of more, less is tried
LONGEST = 14  # cuts that one recomputed segment may span,
LONGEST_IN_LARGE = 8  # and in large programs
# Bytes across that a cut may have more for a byte nearer to the middle. All cuts are placed in each
# of these ways; in large programs in the first alone.
SIDEWAYS = (0.05, 0.2)
MOST_SAVE_SETS = 7
MOST_FREE_SAVE_SETS = 2
MOST_LABELS = 150
MOST_IN_PIECES = 200  # operations of a segment whose backward pass goes piece by piece,
MOST_IN_PIECES_SETS = 2  # with so many save sets
CHEAP = 0.2  # by which no more than this share of FLOPs is run again
FINE_PARTS = 2  # so many parts between neighbouring cuts are cut finely together,
MOST_FINE_CUTS = 12  # at so many places,
MOST_FINE_LABELS = 8  # with so many labels
PEAKS = 6  # for each of so many heights of the peak

Progress = Callable[[float], None]  # told the share that is done


class BudgetTooSmall(ValueError):
    """No plan was found within the budget.

    Attributes:
      lowest: bytes, the lowest peak that a plan was found for: as XLA held it, if it was measured.
      bound: bytes, below which no plan can be, in the planner's model.
      measured_on: the backend and the JAX that `lowest` was measured on; "" for the model's.
    """

    def __init__(self, budget: int, lowest: int, bound: int, measured_on: str = ""):
        held = f" as XLA held it ({measured_on})" if measured_on else ""
        model = " in the planner's model" if measured_on else ""
        super().__init__(
            f"a memory budget of {budget:,} bytes is too small: the lowest peak that was found is "
            f"{lowest:,} bytes{held}, and none below {bound:,} bytes is possible{model}"
        )
        self.lowest, self.bound, self.measured_on = lowest, bound, measured_on


class Planner:
    """Plans for one program, for any number of budgets."""

    def __init__(self, model: MemoryModel, progress: Progress = lambda share: None):
        self.model = model
        self.exact = len(model) <= EXACT
        self._crossing = crossing_bytes(model)
        self._before = [0, *itertools.accumulate(model.sizes)]
        self._alike: dict[Hashable, Choices] = {}
        self._tokens = _tokens(model)
        ways = SIDEWAYS[:1] if len(model) > LARGE else SIDEWAYS
        placed = {tuple(self._places(0, len(model), MOST_CUTS, way)): None for way in ways}
        self._paths = [
            self._paths_between(cuts, _part_of(progress, k, len(placed)))
            for k, cuts in enumerate(placed)
        ]

    def _paths_between(self, cuts: Sequence[int], progress: Progress) -> Paths:
        choices: dict[tuple[int, int], Choices] = {}
        pairs = list(itertools.combinations(range(len(cuts)), 2))
        longest = LONGEST_IN_LARGE if len(self.model) > LARGE else LONGEST
        for done, (i, j) in enumerate(pairs):
            is_short = self.exact or j - i <= longest
            is_small = cuts[j] - cuts[i] <= MOST_IN_PIECES
            inner = [cut - cuts[i] for cut in cuts[i + 1 : j]] if is_small else []
            choices[i, j] = self._choices_of(cuts[i], cuts[j], is_short, inner)
            if j <= i + FINE_PARTS and not self.exact:
                choices[i, j] = self._refined(cuts[i], cuts[j], choices[i, j])
            progress((done + 1) / len(pairs))
        return Paths(self.model, cuts, choices, self._kept_labels)

    # ------------------------------------------------------------------------------------ places

    def _places(self, start: int, stop: int, most: int, sideways: float = SIDEWAYS[0]) -> list[int]:
        """The operations before which a segment may begin, from `start` on, and `stop`."""
        allowed = [i for i in range(start + 1, stop) if self.model.cuts[i] is not None]
        if self.exact or len(allowed) <= most:
            return [start, *allowed, stop]
        crossing, before = self._crossing, self._before
        # The longest piece, by bytes, is cut where the fewest go across, near the middle if many
        # places are alike: in a program of layers, first between these, then inside them.
        chosen = {start, stop}
        pieces = [(before[start] - before[stop], start, stop)]
        while pieces and len(chosen) < most + 2:
            _, first, last = heapq.heappop(pieces)
            places = [i for i in allowed if first < i < last]
            if not places:
                continue
            middle = (before[first] + before[last]) / 2
            place = min(places, key=lambda i: crossing[i] + abs(before[i] - middle) * sideways)
            chosen.add(place)
            for left, right in ((first, place), (place, last)):
                heapq.heappush(pieces, (before[left] - before[right], left, right))
        return sorted(chosen)

    # --------------------------------------------------------------------------------- segments

    def _choices_of(
        self, start: int, stop: int, recompute: bool, inner: Sequence[int] = ()
    ) -> Choices:
        """The ways to run a part as one segment, none of which another is as good as in every
        respect.

        `recompute`: whether to look for ways that recompute; `inner`: places, counted from its
        start, between which its backward pass may go piece by piece.
        """
        inner = () if self.exact else tuple(inner)
        key = (recompute, inner, *self._tokens[start:stop])
        if key not in self._alike:
            piece = Piece(self.model, start, stop)
            if not recompute or any(self.model.fixed[start:stop]):
                saves = []
            else:
                saves = self._all_save_sets(piece) if self.exact else self._saves(piece)
            whole = Segment(0, stop - start)
            runs = [(whole, piece.run(False, frozenset()))]
            for saved in saves:
                way = replace(whole, recompute=True, saved=saved)
                runs.append((way, piece.run(True, saved)))
            cheap = [way for way, local in runs[1:] if local.flops <= CHEAP * sum(piece.flops)]
            for way in cheap[-MOST_IN_PIECES_SETS:] if inner else []:
                runs.append((replace(way, inner=inner), piece.run(True, way.saved, inner)))
            rows = []
            for _, local in runs:
                staying = local.extra + sum([piece.sizes[v] for v in local.stored])
                backward = local.backward_peak - local.unread
                rows.append([local.flops, local.forward_peak, backward, staying - local.unread])
            table = np.array(rows, float)
            compared = table
            if self.exact:  # what others read and it does not keep itself is there for some only
                left = [self._left_by(start, stop, local) for _, local in runs]
                compared = np.column_stack([table, table[:, 3:] + np.array(left, float)])
            chosen = pareto(compared)
            leaving = [v for v, leaves in enumerate(piece.leaves) if leaves and piece.sizes[v]]
            self._alike[key] = Choices(
                [(runs[k][0],) for k in chosen],
                table[chosen],
                [tuple(v for v in leaving if v not in runs[k][1].stored) for k in chosen],
            )
        return self._alike[key]

    def _saves(self, piece: Piece) -> list[frozenset[int]]:
        must_run = [i for i, size in enumerate(piece.extra) if size]
        leaves = [v for v, leaves in enumerate(piece.leaves) if leaves]
        found = Network(piece, piece.needed, must_run, given=piece.given).hull(MOST_SAVE_SETS)
        # What others keep alive anyway costs nothing to save.
        found += Network(piece, piece.needed, must_run, leaves, piece.given).hull(
            MOST_FREE_SAVE_SETS
        )
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

    def _refined(self, start: int, stop: int, whole: Choices) -> Choices:
        """With the ways to run a part as several segments."""
        key = ("refined", *self._tokens[start:stop])
        if key not in self._alike:
            cuts = self._places(start, stop, MOST_FINE_CUTS)
            choices = {
                (i, j): self._choices_of(cuts[i], cuts[j], True)
                for i, j in itertools.combinations(range(len(cuts)), 2)
                if (i, j) != (0, len(cuts) - 1)
            }
            choices[0, len(cuts) - 1] = whole
            paths = Paths(self.model, cuts, choices, lambda labels, cut: _spread(labels))
            at = paths.run(float("inf"))
            final = at[-1]
            assert final is not None
            ways = [paths.way(at, row) for row in range(len(final))]
            self._alike[key] = Choices(
                [tuple(s.shifted(-start) for s in way) for way in ways],
                np.column_stack([final.flops, final.forward, final.backward, final.held[:, -1]]),
                [self._leaves(way, stop) for way in ways],
            )
        return self._alike[key]

    def _leaves(self, way: Sequence[Segment], stop: int) -> tuple[int, ...]:
        """What segments leave for operations from `stop` on, and none before reads."""
        start = way[0].start
        left = []
        for segment in way:
            stored = run_segment(self.model, segment).stored
            for v in range(segment.start, segment.stop):
                first = next((u for u in self.model.uses[v] if u >= segment.stop), 0)
                if first >= stop and v not in stored and self.model.sizes[v]:
                    left.append(v - start)
        return tuple(left)

    # ------------------------------------------------------------------------ dynamic programming

    def _candidates(self, budget: int) -> list[list[Segment]]:
        """The plans with the least extra FLOPs whose peak is within `budget` bytes, one for each
        way to place cuts, before local search; none where none was found."""
        plans = []
        for paths in self._paths:
            at = paths.run(budget - self.model.gathered[-1])
            final = at[-1]
            if final is not None:
                # Of equal FLOPs the one that keeps least.
                row: int = np.lexsort((final.kept, final.flops))[0].item()
                plans.append(paths.way(at, row))
        return plans

    def _kept_labels(self, labels: Labels, cut: int) -> list[int]:
        if self.exact:
            later = labels.held[:, cut + 1 :]
            return pareto(np.column_stack([labels.flops, labels.kept, later]))
        return frontier(labels.flops, labels.kept, MOST_LABELS)

    # ------------------------------------------------------------------------------------- plans

    def plan(self, budget: int) -> tuple[list[Segment], Simulation]:
        """The best plan found within a budget in bytes.

        Raises BudgetTooSmall if there is none.
        """
        found = self.find(budget)
        if found is None:
            raise BudgetTooSmall(budget, self.lowest_peak(), lowest_peak_bound(self.model))
        return found

    def find(self, budget: int) -> tuple[list[Segment], Simulation] | None:
        """`plan`, but None if there is none."""
        kept = keep_all(self.model)
        if kept.peak <= budget:
            return [Segment(0, len(self.model))], kept
        plans = self._candidates(budget)
        if not self.exact:
            plans = [improve(self.model, plan, budget) for plan in plans]
        found = [(plan, simulate(self.model, plan)) for plan in plans]
        return min(found, key=lambda pair: (pair[1].flops, pair[1].peak), default=None)

    def lowest_peak(self) -> int:
        """The lowest peak, in bytes, for which `plan` finds a plan (to a hundredth)."""
        low = max((step_bytes(self.model, i) for i in range(len(self.model))), default=0)
        nothing = keep_all(self.model).peak
        high = nothing
        while high - low > max(0 if self.exact else nothing // 500, 0) and low < high:
            middle = (low + high) // 2
            plans = self._candidates(middle)
            if plans:
                high = min(simulate(self.model, plan).peak for plan in plans)
            else:
                low = middle + 1
        return high


def _part_of(progress: Progress, part: int, parts: int) -> Progress:
    return lambda share: progress((part + share) / parts)


def _spread(labels: Labels) -> list[int]:
    """Rows of few bytes for few FLOPs, for several heights of the peak."""
    peak = np.maximum(labels.forward, labels.backward)
    chosen: set[int] = set()
    for level in np.linspace(peak.min(), peak.max(), PEAKS):
        (low,) = np.nonzero(peak <= level)
        chosen.update(low[frontier(labels.flops[low], labels.kept[low], MOST_FINE_LABELS)].tolist())
    return sorted(chosen)


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
            tuple((i - v, model.sizes[v], *(i - u for u in model.uses[v])) for v in model.args[i]),
            tuple(i - v for v in model.needs[i]),
            tuple(i - v for v in model.behind[i]),
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
        changed = replace(segment, saved=segment.saved | {v})
        move = [*best[:k], changed, *best[k + 1 :]]
        then = simulate(model, move, known)
        if then.peak <= budget and then.flops < now.flops:
            best, now = move, then
        else:
            refused.add((k, v))
    return best
