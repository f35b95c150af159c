"""The record of a tape: the operations on followed arrays, and their operands and results.

An array is followed if it is watched, or computed from a followed array. A record is a list of
entries, one for each operation: its computation, and the slots of its operands and results. A slot
is the number of an array in the record. Arrays are told apart by identity, not by value.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from tracegrad import _jax
from tracegrad.tape.computations import Computation
from tracegrad.tape.recorded_rules import RecordedRule
from tracegrad.variables.lending import give_back
from tracegrad.variables.variable import Variable


class Entry(NamedTuple):
    """One operation that has run.

    Attributes:
      computation: for a function with a rule that ran on values, a `RecordedRule`.
      args, results: the slots of its operands and results.
      source_info: JAX's source info of the call.
    """

    computation: Computation | RecordedRule
    args: tuple[int, ...]
    results: tuple[int, ...]
    source_info: Any

    @property
    def needed(self) -> tuple[int, ...]:
        """The slots of the arrays that the pull-back takes besides cotangents."""
        if getattr(self.computation, "count", None) is None:  # without residuals
            return self.args
        return (*self.args, *self.results)


class Record:
    """The operations of one tape, and their arrays.

    The record holds the arrays, so that no other array gets the same id.

    Attributes:
      keeps_operations: whether it keeps entries, from which gradients are computed later.
      orders: the highest order of derivative that users may ask for.
      arrays: the arrays by slot.
      tracked: maps the ids of followed arrays to slots.
      watched: the slots of arrays that were watched.
      others: maps the ids of other operands and results to slots.
      without_gradient: the slots of results without a gradient: integers, and constants to a
        derivative (`Computation.constant_results`).
    """

    keeps_operations = True

    def __init__(self, orders: int = 1) -> None:
        self.orders = orders
        self.arrays: list[Any] = []
        self.entries: list[Entry] = []
        self.tracked: Any = {}
        self.watched: set[int] = set()
        self.others: dict[int, int] = {}
        self.without_gradient: list[int] = []
        # Weak references, by id, to the operands of operations that were not recorded.
        self.unfollowed: dict[int, weakref.ref[Any]] = {}
        # For each watched Variable, the arrays that were read from it, by id.
        self.reads: dict[Variable, dict[int, Any]] = {}
        # (Variable, array), if only this record was shown the array. The end of the record gives
        # the array back, so that a program may overwrite it.
        self.shown: list[tuple[Variable, Any]] = []

    # --------------------------------------------------------------------------- followed arrays

    def watch(self, array: Any) -> None:
        if id(array) not in self.tracked:
            self.tracked[id(array)] = self._new_slot(array)
        self.watched.add(self.tracked[id(array)])

    def slot(self, array: Any) -> int:
        """Returns the slot of an array; a new slot if the array has none."""
        slot = self.tracked.get(id(array))
        if slot is None:
            slot = self.others.get(id(array))
        if slot is None:
            slot = self.others[id(array)] = self._new_slot(array)
        return int(slot)

    def _new_slot(self, array: Any) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1

    def follows(self, array: Any) -> bool:
        """Whether the array may be a source or a target."""
        return id(array) in self.tracked

    def note_use(self, arrays: Iterable[Any]) -> bool:
        """Returns whether the record follows one of these operands; if not, notes that they were
        used unfollowed."""
        tracked = self.tracked
        for array in arrays:
            if id(array) in tracked:
                return True
        if self.keeps_operations:
            for array in arrays:
                if isinstance(array, jax.Array):
                    self.unfollowed[id(array)] = weakref.ref(array)
        return False

    def active(self, operands: Sequence[Any]) -> tuple[int, ...]:
        """Returns the positions of the followed operands that have a gradient."""
        tracked = self.tracked
        return tuple(
            [i for i, x in enumerate(operands) if id(x) in tracked and _jax.has_gradient(x)]
        )

    def was_used_unfollowed(self, array: Any) -> bool:
        """Whether the array was an operand while it was not followed."""
        seen = self.unfollowed.get(id(array))
        return id(array) in self.others or (seen is not None and seen() is array)

    def add(
        self,
        computation: Computation | RecordedRule,
        args: Sequence[Any],
        results: Sequence[Any],
        info: Any,
    ) -> None:
        tracked, others, arrays = self.tracked, self.others, self.arrays
        slots = []
        for arg in args:
            slot = tracked.get(id(arg))
            if slot is None:
                slot = others.get(id(arg))
                if slot is None:
                    slot = others[id(arg)] = len(arrays)
                    arrays.append(arg)
            slots.append(slot)
        first = len(arrays)
        arrays.extend(results)
        for slot, result in enumerate(results, first):
            if _jax.has_gradient(result) and slot - first not in computation.constant_results:
                tracked[id(result)] = slot
            else:
                others[id(result)] = slot
                self.without_gradient.append(slot)
        self.entries.append(
            Entry(computation, tuple(slots), tuple(range(first, len(arrays))), info)
        )

    # ---------------------------------------------------------------------------------- Variables

    def watch_variable(self, variable: Variable) -> None:
        """Watches a Variable from its next read on."""
        self.reads.setdefault(variable, {})

    def watch_read(self, variable: Variable, value: Any) -> None:
        self.watch(value)
        self.reads.setdefault(variable, {})[id(value)] = value

    @property
    def variable_names(self) -> dict[int, str]:
        """Maps the ids of arrays that were read from Variables to the Variables' names."""
        return {
            id(v): variable.name for variable, reads in self.reads.items() for v in reads.values()
        }

    def reads_of(self, source: Any) -> list[Any]:
        """Returns the source itself or, for a Variable, the arrays that were read from it."""
        if isinstance(source, Variable):
            return list(self.reads.get(source, {}).values())
        return [source]

    def hand_out(self) -> None:
        """Never gives back the arrays shown so far, since another record may have them now."""
        self.shown.clear()

    # ------------------------------------------------------------------------------------- the end

    def forget(self) -> None:
        """Forgets all operations and arrays. Keeps the watched Variables."""
        self.arrays.clear()
        self.entries.clear()
        self.tracked.clear()
        self.watched.clear()
        self.others.clear()
        self.unfollowed.clear()
        self.without_gradient.clear()
        for reads in self.reads.values():
            reads.clear()
        if self.shown:
            give_back(self.shown)
            self.shown.clear()


def entries_between(
    record: Record,
    sources: Iterable[int],
    targets: Iterable[int],
    stopped: Collection[int] = (),
    *,
    follows_data: bool = False,
) -> list[tuple[Entry, tuple[int, ...]]]:
    """Returns the entries on a path from a source to a target, in order: (entry, positions of the
    active operands, which may get a cotangent).

    Args:
      sources, targets: slots of arrays in the record.
      stopped: slots that count as constants.
      follows_data: whether paths also go where no cotangent goes back (through `stop_gradient`, or
        a constant of a rule). Then the entries can be computed again, without recorded values.
    """
    reached, wanted = set(sources), set(targets)
    ending = {*stopped, *record.without_gradient}
    forward, path = [], []
    for entry in record.entries:
        if not follows_data and getattr(entry.computation, "primitive", None) is _jax.STOP_GRADIENT:
            continue
        # A custom rule returns nothing for constants.
        first = 0 if follows_data else getattr(entry.computation, "constants", 0)
        active = tuple([i for i, slot in enumerate(entry.args) if slot in reached and i >= first])
        if active:
            forward.append((entry, active))
            reached.update([s for s in entry.results if s not in ending])
    for entry, active in reversed(forward):
        if not wanted.isdisjoint(entry.results):
            path.append((entry, active))
            wanted.update(entry.args if follows_data else [entry.args[i] for i in active])
    return path[::-1]
