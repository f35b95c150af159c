"""The structure of what is recorded, as a path in a tree that all records share.

Each operation is one step on the path: what it computes, and the slots of its operands. Records of
one structure go the same way and end at the same step, so that the last step says all about a
record but the values, and what was made for one (its compiled backward) is found there for the
next without looking at an operation again.
"""

from __future__ import annotations

import threading
from typing import Any

from tracegrad import _jax
from tracegrad.tape.computations import Computation, when_forgetting


class Step:
    """One operation of a structure, or (without a computation) an array that is followed from then
    on.

    Arrays are numbered by slots, in the order in which a record meets them: first the operands of
    a step that are new, then its results.
    """

    __slots__ = ("args", "computation", "is_shared", "live", "next", "programs", "results", "types")

    def __init__(
        self,
        computation: Computation | None,
        args: tuple[int, ...],
        results: tuple[int, ...],
        types: tuple[Any, ...],
        is_shared: bool,
    ):
        self.computation = computation
        self.args = args
        self.results = results
        self.types = types  # of the new operands and of the results
        # For each result, whether it has a gradient: an integer ends it.
        self.live = tuple([_jax.has_gradient(t) for t in types[len(types) - len(results) :]])
        self.is_shared = is_shared
        self.next: dict[Any, Step] = {}
        # What was compiled for records that end here, as long as others hold it.
        self.programs: dict[Any, Any] = {}

    def after(self, key: Any, step: Step) -> Step:
        """Makes a step that follows this one, unless another thread was faster."""
        if step.is_shared:
            step = self.next.setdefault(key, step)
            _count_step()
        return step


# A tree that would grow for ever (a loop whose structure is another at each turn) is left to the
# records that are on it, and a new one begun.
_LIMIT = 1 << 15
_lock = threading.Lock()
_root = Step(None, (), (), (), is_shared=True)
_steps = 0


def root() -> Step:
    """Where every record begins."""
    return _root


def _count_step() -> None:
    global _steps
    _steps += 1
    if _steps > _LIMIT:
        begin_anew()


def begin_anew() -> None:
    """Forgets all structures but those of the records that are on their way."""
    global _root, _steps
    with _lock:
        _root, _steps = Step(None, (), (), (), is_shared=True), 0


when_forgetting(begin_anew)  # structures hold computations
