"""Finds the gradients that are lost because a function with a custom rule closes over an array.

A custom gradient returns gradients of its arguments only, on a tape as in TensorFlow. If a watched
array loses part of its gradient so, the tape warns when the user asks for this gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.ir import CustomGradient, Node, has_gradient
from tracegrad.ir.closed_over import depends_on
from tracegrad.ir.dependence import Masks, joined, of_each
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.tape.computations import Computation, trace_for_types
from tracegrad.tape.record import Entry, LostGradient, Record, lost_gradient_text, type_of_slot
from tracegrad.tape.recorded_rules import (
    RecordedRule,
    UserNames,
    closed_over_by,
    closes_over_arrays,
)

# --------------------------------------------------------------------------- rules on values


def find_lost_by_rule(
    record: Record,
    begun: tuple[int, int],
    rule: RecordedRule,
    operands: Sequence[Any],
    computed: Sequence[Any],
    info: Any,
) -> list[LostGradient]:
    """Returns a lost gradient, still without `results`, for each followed array that a function
    with a rule on values closes over. The function has just run.

    Args:
      record: a record of the operations that the function ran.
      begun: how many entries and lost gradients the record had before the call.
      rule: the rule of the function.
      operands: the arrays for which the rule returns gradients.
      computed: the arrays that the function has returned.
      info: JAX's source info of the call.
    """
    first, first_lost = begun
    tracked, arrays = record.tracked, record.arrays
    returned = [tracked[id(each)] for each in computed if id(each) in tracked]
    if not returned or rule.describe is None:
        return []
    made, used = set[int](), dict[int, None]()
    for entry in record.entries[first:]:
        used.update(dict.fromkeys(slot for slot in entry.args if slot not in made))
        made.update(entry.results)
    used.update(dict.fromkeys(slot for slot in returned if slot not in made))
    passed = set(map(id, operands))
    followed = [s for s in used if tracked.get(id(arrays[s])) == s and id(arrays[s]) not in passed]
    inside = first, len(record.entries), tuple(returned)
    describe = rule.describe

    def text(array: Any) -> str:
        return lost_gradient_text(describe(array), info)

    by_inner = record.lost[first_lost:]  # lost by the functions that this function has called
    by_this = [LostGradient(s, (), functools.partial(text, arrays[s]), inside) for s in followed]
    return [*by_inner, *by_this]


# --------------------------------------------------------------------------- rules in programs


def add_lost_in_programs(
    records: Sequence[Record],
    computation: Computation,
    operands: Sequence[Any],
    results: Sequence[Any],
) -> None:
    """Adds lost gradients to records, for an operation that has just run: a function with a rule in
    its programs may close over operands of the operation."""
    may_lose = computation.derived.get(closed_over_by)
    if may_lose is None:
        programs = [program for _, program in _jax.sub_programs(computation.params)]
        may_lose = any(map(closes_over_arrays, programs))
        may_lose |= bool(closed_over_by(computation.primitive, computation.params))
        computation.derived[closed_over_by] = may_lose
    if not may_lose:
        return
    key = add_lost_in_programs, tuple(map(_jax.type_key, operands))
    lost = computation.derived.get(key)
    if lost is None:
        types = list(map(jax.typeof, operands))
        lost = computation.derived[key] = find_lost_operands(computation.called, types)
    add_lost_operands(records, lost, operands, results)


LostOperands = list[tuple[int, UserNames, tuple[int, ...]]]


def add_lost_operands(
    records: Sequence[Record], lost: LostOperands, operands: Sequence[Any], results: Sequence[Any]
) -> None:
    """Adds the lost gradients that `find_lost_operands` has found to records."""
    info = _jax.current_source_info() if lost else None
    for operand, what, places in lost:
        for record in records:
            record.add_lost_gradient(operands[operand], [results[i] for i in places], what, info)


def find_lost_operands(fun: Any, types: Sequence[Any]) -> LostOperands:
    """Finds the operands of `fun` that an inner function with a rule closes over. Returns
    (position, names, results): the user's names for inner function and array, and the positions of
    the results of `fun` that are connected to a result of the inner function."""
    walk = _ClosedOver(len(types))
    outs = walk.region(trace_for_types(fun, types), of_each(map(_jax.has_gradient, types)))
    return [
        (operand, what, places)
        for (operand, what), bit in walk.bits.items()
        if (places := tuple([i for i, mask in enumerate(outs) if mask & bit]))
    ]


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


# --------------------------------------------------------------------------- warning the user


def warn_of_lost(record: Record, sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Warns, at the user's line, of each lost gradient that is part of a requested gradient."""
    if not record.lost:
        return
    starts, ends = (
        [record.slot(each) for each in arrays if record.has_slot(each)]
        for arrays in (sources, targets)
    )
    for text in dict.fromkeys(lost.text() for lost in _lost_between(record, starts, ends)):
        warn_where_called(text, UserWarning)


def _lost_between(
    record: Record, sources: Sequence[int], targets: Sequence[int]
) -> list[LostGradient]:
    """Returns the lost gradients on a path from a source to a target."""
    # Bit 0 of a mask comes from the sources, bit i from the results of the i-th lost gradient.
    starts = dict.fromkeys(sources, 1)
    for i, lost in enumerate(record.lost, 1):
        for slot in lost.results:
            starts[slot] = starts.get(slot, 0) | 1 << i
    masks = _spread(record, record.entries, starts)
    arrived = joined(masks.get(slot, 0) for slot in targets)
    return [
        lost
        for i, lost in enumerate(record.lost, 1)
        if masks.get(lost.array, 0) & 1 and arrived >> i & 1 and _is_connected(record, lost)
    ]


def _is_connected(record: Record, lost: LostGradient) -> bool:
    """Whether the array is connected to the results of the function, if the function has a rule on
    values; for other functions `find_lost_operands` has found this."""
    if lost.inside is None:
        return True
    first, end, returned = lost.inside
    masks = _spread(record, record.entries[first:end], {lost.array: 1})
    return any(masks.get(slot, 0) for slot in returned)


def _spread(record: Record, entries: Sequence[Entry], starts: dict[int, int]) -> dict[int, int]:
    """Spreads the masks of `starts`, by slot, from the operands of entries to connected results.
    The mask of a slot is the union of all masks that reach it."""
    masks = dict(starts)
    for entry in entries:
        ins = [masks.get(slot, 0) for slot in entry.args]
        if not any(ins):
            continue
        rows = _links(record, entry)
        for slot, row in zip(entry.results, rows):
            arriving = joined(mask for i, mask in enumerate(ins) if row >> i & 1)
            masks[slot] = masks.get(slot, 0) | arriving
    return masks


def _links(record: Record, entry: Entry) -> Sequence[int]:
    """Returns, for each result of an entry, the mask of the connected operands."""
    computation, count = entry.computation, len(entry.args)
    if isinstance(computation, RecordedRule):
        return [(1 << count) - 1] * len(entry.results)
    types = [type_of_slot(record.arrays[slot]) for slot in entry.args]
    links = computation.links(types)
    of_residuals = [(1 << count) - 1] * (len(entry.results) - len(links))
    return [*links, *of_residuals]
