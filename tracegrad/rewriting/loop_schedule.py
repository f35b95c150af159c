"""Which states of a loop are kept while nobody knows how often it runs, and how they are replayed.

On the way forward one state more than `slots` is kept at most, evenly: one every ``1 << level``
steps, and where there are no more places one every ``2 << level``, each in the place of one between
two others, from the left. Once the number of steps is known, the steps between two kept states are
replayed by the binomial schedule, which is optimal for a known number, with `slots` places of which
the first is that of the kept state. These are ``2 * slots`` states at a time, and the one that is
differentiated.

So this replays no more steps than the binomial optimum of `slots` states (Griewank and Walther,
*Revolve*, 2000), though that knows the number of steps from the start:
half of the memory makes up for not knowing it. Without it nobody could (Stumm and Walther, *New
algorithms for optimal online checkpointing*, 2010): with two states in all, however they are moved
forward, there is a number of steps of which 1.177 times as many are replayed as by the best places
for that number; with three 1.101 times, with four 1.07 times (by trying all ways, of numbers up to
300, 120 and 40).

The functions are of NumPy's or of JAX's integers (`np` says which), so that what runs can be
counted without running it.
"""

from __future__ import annotations

from math import comb
from typing import Any

import numpy

_LARGEST = 2**31 - 1
# Up to so many steps between two kept states the schedule is optimal, if no step is run more often.
# The table below is small: XLA's CPU backend makes one kernel of a loop that touches few bytes.
_MOST_STEPS = 10**6
_MOST_REPETITIONS = 192


def place_of(position: Any, places: int, np: Any) -> Any:
    """Where the state after so many steps is kept, if it is.

    The first states are in order. From then on it is where the one was that is given up for it: of
    an odd number of places that one is just so many, ``places << (level - 1)`` steps, before; of an
    even number one less, of the places beside that of the initial state.
    """
    if places % 2:
        return np.fmod(position, places)
    return np.where(position > 0, 1 + np.fmod(position - 1, places - 1), 0)


def next_to_keep(position: Any, level: Any, places: int, np: Any) -> tuple[Any, Any]:
    """After how many steps the next state is kept, and the level from then on.

    Args:
      position: after how many steps the last one was kept.
      level: until now.
      places: how many there are, at least 2.
    """
    level = np.where((position >> level) < places - 1, level, level + 1)
    return ((position >> level) + 1) << level, level


def last_before(end: Any, level: Any, positions: Any, np: Any) -> Any:
    """After how many steps the last state is that was kept before a step.

    Args:
      end: that step, at least 1.
      level: at last.
      positions: i32[places]: after how many steps those that are kept were.
    """
    finer = np.maximum(level - 1, 0)
    near, far = ((end - 1) >> finer) << finer, ((end - 1) >> level) << level
    is_kept = positions[place_of(near, len(positions), np)] == near
    return np.where(is_kept, near, far)


def reaches(slots: int) -> numpy.ndarray[Any, Any]:
    """i32[slots + 1, repetitions]: how many steps so many slots reverse, none replayed oftener."""
    repetitions = 2
    while comb(slots + repetitions, slots) < _MOST_STEPS and repetitions < _MOST_REPETITIONS:
        repetitions += 1
    rows = [[min(comb(s + r, r), _LARGEST) for r in range(repetitions)] for s in range(slots + 1)]
    return numpy.array(rows, numpy.int32)


def steps_to_next(length: Any, free: Any, reaches: Any, np: Any) -> Any:
    """How far to go from a kept state to the next that is kept, in order to reverse `length` steps.

    Args:
      length: at least 2, the first of them being from the kept state.
      free: how many slots there are beside the one of that state.
      reaches: how far all slots reach; see there.
    """
    reached = np.asarray(reaches)
    own, fewer = reached[free + 1], reached[free]
    repetitions = np.sum(own < length) - 1  # of the states before the next, at most
    best = np.minimum(own[repetitions], length - fewer[repetitions])
    return np.where(length > own[-1], length - fewer[-1], best)
