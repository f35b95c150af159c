"""Which states of a loop are kept while nobody knows how often it runs, and how they are replayed.

On the way forward at most `slots` states are kept, evenly: one every ``1 << level`` steps, and
where there are no more places one every ``2 << level``, each in the place of one between two
others, from the left. Once the number of steps is known, the steps between two kept states are
replayed with `slots` more places and the binomial schedule, which is optimal for a known number.

Since the states in between may take as many places as those that were kept, this replays no more
steps than the best placement of `slots` states alone would, had it known the number of steps
(Griewank and Walther, *Revolve*, 2000: that is `fewest_replayed`). The problem is that of Stumm and
Walther, *New algorithms for optimal online checkpointing*, 2010.

The functions are of NumPy's or of JAX's integers (`np` says which), so that what runs can be
counted without running it.
"""

from __future__ import annotations

from math import comb
from typing import Any

import numpy

from tracegrad._jax.caches import cached

_LARGEST = 2**31 - 1
# Up to so many steps between two kept states the schedule is optimal, if no step is run more often.
# The table below is small: XLA's CPU backend makes one kernel of a loop that touches few bytes.
_MOST_STEPS = 10**6
_MOST_REPETITIONS = 192


def slot_to_keep(kept: Any, level: Any, positions: Any, np: Any) -> Any:
    """Where the next state is kept, when `kept` were."""
    slots = len(positions)
    between = (positions >> level) & 1
    leftmost = np.argmin(np.where(between == 1, positions, _LARGEST))
    return np.where(kept < slots, kept, leftmost)


def next_to_keep(position: Any, kept: Any, level: Any, positions: Any, np: Any) -> tuple[Any, Any]:
    """After how many steps the next state is kept, and the level from then on.

    Args:
      position: after how many steps the last one was kept.
      kept: how many were, that one included.
      level: until now.
      positions: after how many steps those in the slots were, that one included.
    """
    if len(positions) == 1:
        return np.full_like(position, _LARGEST), level
    is_full = kept >= len(positions)
    no_more_between = np.all((positions >> level) & 1 == 0)
    level = np.where(is_full & no_more_between, level + 1, level)
    apart = 2 << level
    return np.where(is_full, (position // apart + 1) * apart, position + 1), level


def slot_before(end: Any, kept: Any, positions: Any, np: Any) -> Any:
    """Where the last state before a step is."""
    is_before = (np.arange(len(positions)) < kept) & (positions < end)
    return np.argmax(np.where(is_before, positions, -1))


@cached(16)  # a table for each number of slots: a loop is traced with it a few times
def _reaches(slots: int) -> numpy.ndarray[Any, Any]:
    """i32[slots + 1, repetitions]: how many steps so many slots reverse, none replayed oftener."""
    repetitions = 2
    while comb(slots + repetitions, slots) < _MOST_STEPS and repetitions < _MOST_REPETITIONS:
        repetitions += 1
    rows = [[min(comb(s + r, r), _LARGEST) for r in range(repetitions)] for s in range(slots + 1)]
    return numpy.array(rows, numpy.int32)


def steps_to_next(length: Any, free: Any, slots: int, np: Any) -> Any:
    """How far to go from a kept state to the next that is kept, in order to reverse `length` steps.

    Args:
      length: at least 2, the first of them being from the kept state.
      free: how many slots there are beside the one of that state, of `slots` in all.
    """
    reaches = np.asarray(_reaches(slots))
    own, fewer = reaches[free + 1], reaches[free]
    repetitions = np.sum(own < length) - 1  # of the states before the next, at most
    best = np.minimum(own[repetitions], length - fewer[repetitions])
    return np.where(length > own[-1], length - fewer[-1], best)


# ---------------------------------------------------------------------------------------- counting


def replayed(steps: int, slots: int) -> int:
    """How many steps of a loop are run again, without those that are differentiated where they run,
    each once."""
    position, kept, level, positions = 0, 0, 0, numpy.zeros(slots, numpy.int64)
    while position < steps:
        positions[slot_to_keep(kept, level, positions, numpy)] = position
        kept += 1
        after, level = next_to_keep(numpy.asarray(position), kept, level, positions, numpy)
        position = int(after)
    count, end = 0, steps
    while end > 0:
        start = int(positions[slot_before(end, kept, positions, numpy)])
        stack = [start]
        while end > start:
            while stack[-1] < end - 1:
                free = slots - len(stack)
                forward = int(steps_to_next(end - stack[-1], free, slots, numpy))
                count += forward
                stack.append(stack[-1] + forward)
            end = stack.pop() if len(stack) > 1 else start
    return count


def fewest_replayed(steps: int, slots: int) -> int:
    """The binomial optimum for a number of steps that is known from the start."""
    if steps <= 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2 - (steps - 1)
    repetitions = 0
    while comb(slots + repetitions, slots) < steps:
        repetitions += 1
    return repetitions * steps - comb(slots + repetitions, slots + 1) - (steps - 1)
