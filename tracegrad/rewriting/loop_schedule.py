"""The schedule of a loop's checkpoints: which states are kept, and which steps are replayed.

The number of steps is not known in the forward pass. The forward pass keeps at most ``slots + 1``
states at even distances: a state every ``1 << level`` steps and, when all places are full, a state
every ``2 << level`` steps, which replaces, from the left, the states that lie between two others.
In the backward pass the number is known. The steps between two kept states are replayed by the
binomial schedule, which is optimal for a known number, with `slots` places; the kept state has the
first of them. That makes ``2 * slots`` states at a time, and the state that is differentiated.

So this schedule replays no more steps than the binomial optimum of `slots` states (Griewank and
Walther, *Revolve*, 2000), which knows the number of steps from the start. The second half of the
memory makes up for the unknown number. `slots` states in all are not enough (Stumm and Walther,
*New algorithms for optimal online checkpointing*, 2010): for each strategy with two states there is
a number of steps for which the strategy replays 1.177 times as many steps as the optimum for that
number; with three states 1.101 times, with four 1.07 times (found by trying all strategies, for
numbers up to 300, 120 and 40).
"""

from __future__ import annotations

from math import comb
from typing import Any

import jax.numpy as jnp
import numpy as np

_LARGEST = 2**31 - 1
# The schedule is optimal up to _MOST_STEPS steps between two kept states, if no step is run more
# than _MOST_REPETITIONS times. These limits keep the table of `reaches` small: XLA's CPU backend
# compiles a loop that touches few bytes to one kernel.
_MOST_STEPS = 10**6
_MOST_REPETITIONS = 192


def place_of_state(position: Any, places: int) -> Any:
    """Returns the place of the state after `position` steps, if that state is kept.

    The first states fill the places in order. If the number of places is odd, a later state
    replaces the state that is ``places << (level - 1)`` steps before it. If the number is even, the
    initial state keeps the first place, and the other places count as an odd number of places.
    """
    if places % 2:
        return jnp.fmod(position, places)
    return jnp.where(position > 0, 1 + jnp.fmod(position - 1, places - 1), 0)


def next_to_keep(position: Any, level: Any, places: int) -> tuple[Any, Any]:
    """Returns the position of the next state to keep, and the level from then on. A position is a
    number of steps from the start. `position` is the position of the last kept state; there are at
    least 2 places."""
    level = jnp.where((position >> level) < places - 1, level, level + 1)
    return ((position >> level) + 1) << level, level


def last_before(end: Any, level: Any, positions: Any) -> Any:
    """Returns the position of the last kept state before `end`, which is at least 1. `level` is the
    level at the end of the forward pass; `positions`, i32[places], has the positions of the kept
    states."""
    finer = jnp.maximum(level - 1, 0)
    near, far = ((end - 1) >> finer) << finer, ((end - 1) >> level) << level
    is_kept = positions[place_of_state(near, len(positions))] == near
    return jnp.where(is_kept, near, far)


def reaches(slots: int) -> np.ndarray[Any, Any]:
    """Returns i32[slots + 1, repetitions]: at [s, r], the largest number of steps that s slots can
    reverse without replaying a step more than r times."""
    repetitions = 2
    while comb(slots + repetitions, slots) < _MOST_STEPS and repetitions < _MOST_REPETITIONS:
        repetitions += 1
    rows = [[min(comb(s + r, r), _LARGEST) for r in range(repetitions)] for s in range(slots + 1)]
    return np.array(rows, np.int32)


def steps_to_next(length: Any, free: Any, reaches: Any) -> Any:
    """Returns the number of steps from a kept state to the next state to keep in the replay.

    Args:
      length: the number of steps to reverse, from the kept state on; at least 2.
      free: the number of free slots, without the slot of the kept state.
      reaches: the table of `reaches` for all slots.
    """
    reached = jnp.asarray(reaches)
    own, fewer = reached[free + 1], reached[free]
    repetitions = jnp.sum(own < length) - 1  # the most that a step is replayed
    best = jnp.minimum(own[repetitions], length - fewer[repetitions])
    return jnp.where(length > own[-1], length - fewer[-1], best)
