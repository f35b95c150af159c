"""Warns of gradients that are lost because a function with a custom rule closes over an array.

A custom gradient returns gradients of its arguments only, on a tape as in TensorFlow. If the
function closes over an array that a tape follows, a part of the array's gradient is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.ir import CustomGradient, Node, has_gradient
from tracegrad.ir.closed_over import depends_on
from tracegrad.ir.dependence import Masks, joined, of_each
from tracegrad.ir.occurrence import at, origin_in, warn_where_called
from tracegrad.tape.computations import Computation, trace_for_types
from tracegrad.tape.record import Entry, Record
from tracegrad.tape.recorded_rules import UserNames, closed_over_by, closes_over_arrays

CURE_OF_LOST_GRADIENT = (
    "If it is a constant, apply stop_gradient to it; otherwise make it a positional argument of a "
    "custom_gradient, and return its gradient as well (grad_pass_through cannot)"
)


def warn_of_lost(
    records: Sequence[Record], lost: Iterable[tuple[Any, UserNames]], info: Any
) -> None:
    """Warns, at the user's line, of each of the `lost` arrays that one of the records follows.

    Args:
      lost: (array, names): an array on which the result of a function with a rule depends and for
        which the rule returns no gradient; the user's names for the function, and for the array.
      info: JAX's source info of the call.
    """
    names = [what for array, what in lost if any(_is_connected(each, array) for each in records)]
    line, is_users = origin_in(_jax.frames(info)) if names else (None, False)
    for function, array in dict.fromkeys(names):
        warn_where_called(
            f"{function}, which has a custom gradient, depends on {array}, which it closes over or "
            "is given by keyword, and which is watched or computed from what is watched. Its "
            "gradient function returns no gradient for it, so the part of the gradient that goes "
            f"through the call{at(line if is_users else None)} is missing. {CURE_OF_LOST_GRADIENT}",
            UserWarning,
        )


def _is_connected(record: Record, array: Any) -> bool:
    """Whether a record follows an array, and not only through `stop_gradient`."""
    if id(array) not in record.tracked or not record.keeps_operations:  # an accumulator
        return id(array) in record.tracked
    return bool(_origins(record, record.entries, {record.slot(array)}))


def find_closed_over(
    record: Record, first: int, operands: Sequence[Any], computed: Sequence[Any]
) -> list[Any]:
    """Returns the followed arrays that a function with a rule on values closes over.

    The function has just run: `record` has its entries from the entry `first` on. `operands` are
    the arrays for which the rule returns gradients, `computed` the arrays that the function has
    returned.
    """
    entries, arrays = record.entries, record.arrays
    passed = set(map(id, operands))
    returned = {record.tracked[id(each)] for each in computed if id(each) in record.tracked}
    return [
        arrays[slot]
        for slot in _origins(record, entries[first:], returned)
        if id(arrays[slot]) not in passed
    ]


def _origins(record: Record, entries: Sequence[Entry], slots: set[int]) -> list[int]:
    """Returns the slots of arrays that were watched, or followed before the first of the entries,
    and from which the entries compute `slots`, except through `stop_gradient`."""
    wanted, made = set(slots), set[int]()
    for entry in reversed(entries):
        made.update(entry.results)
        is_stop = getattr(entry.computation, "primitive", None) is _jax.STOP_GRADIENT
        if not is_stop and not wanted.isdisjoint(entry.results):
            wanted.update(s for s in entry.args if record.tracked.get(id(record.arrays[s])) == s)
    return sorted(wanted - (made - record.watched))


# --------------------------------------------------------------------------- rules in programs


def warn_of_lost_in_programs(
    records: Sequence[Record], computation: Computation, operands: Sequence[Any]
) -> None:
    """Warns for an operation that has just run: a function with a rule in its programs may close
    over operands of the operation."""
    may_lose = computation.derived.get(closed_over_by)
    if may_lose is None:
        programs = [program for _, program in _jax.sub_programs(computation.params)]
        may_lose = any(map(closes_over_arrays, programs))
        may_lose |= bool(closed_over_by(computation.primitive, computation.params))
        computation.derived[closed_over_by] = may_lose
    if not may_lose:
        return
    key = warn_of_lost_in_programs, tuple(map(_jax.type_key, operands))
    lost = computation.derived.get(key)
    if lost is None:
        types = list(map(jax.typeof, operands))
        lost = computation.derived[key] = _find_lost_operands(computation.called, types)
    named = [(operands[position], what) for position, what in lost]
    warn_of_lost(records, named, _jax.current_source_info())


def _find_lost_operands(fun: Any, types: Sequence[Any]) -> list[tuple[int, UserNames]]:
    """Finds the operands of `fun` that an inner function with a rule closes over, and that a result
    depends on by it. Returns (position, names): the user's names for inner function and array."""
    walk = _ClosedOver(len(types))
    outs = walk.region(trace_for_types(fun, types), of_each(map(_jax.has_gradient, types)))
    arrived = joined(outs)
    return [each for each, bit in walk.bits.items() if arrived & bit]


class _ClosedOver(Walk):
    """A walk whose masks have a bit for each operand, and then a bit for each operand that a
    function with a rule closes over. The second kind of bit starts at the function's results."""

    def __init__(self, count: int):
        self._count = count
        self.bits: dict[tuple[int, UserNames], int] = {}

    def rule(self, node: Node, ins: Masks) -> Masks:
        outs = super().rule(node, ins)
        for position, what in closed_over_by(node.primitive, node.params):
            assert isinstance(node, CustomGradient)
            operands = [i for i in range(self._count) if ins[position] >> i & 1]
            if operands and depends_on(node.primal, position):
                for i in operands:
                    bit = self.bits.setdefault((i, what), 1 << self._count + len(self.bits))
                    outs = [m | bit if has_gradient(v) else m for m, v in zip(outs, node.outputs)]
        return outs
