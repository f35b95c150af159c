"""A backward pass in pieces: rules on values, and what was recorded between them.

A rule on values is Python code, called between the programs of what comes after it and before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracegrad import _jax
from tracegrad.differentiation.pull_back import Aggregation, sum_of_known
from tracegrad.tape.block import Operation, on_the_way
from tracegrad.tape.record import Record
from tracegrad.tape.rules_on_values import is_on_values


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a backward pass: a rule, or the operations between two rules.

    Attributes:
      operations: which of the record's.
      is_rule: whether it is the one operation that has a rule on values.
      args: the slots to which it gives cotangents. Of a rule: of all operands.
      results: the slots of what it has made.
      active: for each of `args` whether its cotangent is wanted.
      programs: what was compiled for it, by what was given.
    """

    operations: tuple[int, ...]
    is_rule: bool
    args: tuple[int, ...]
    results: tuple[int, ...]
    active: tuple[bool, ...]
    programs: dict[Any, Any] = field(default_factory=dict)


# From the cotangents of these slots, results of a piece that is no rule, to those of its args; for
# each of these, whether it may be slices.
RunPiece = Callable[[Piece, Sequence[int], Sequence[Any], tuple[bool, ...]], list[Any]]


def pieces_between(
    record: Record, sources: tuple[int, ...], targets: tuple[int, ...], stopped: frozenset[int]
) -> Sequence[Piece]:
    """The pieces of a backward pass, in the order in which they run; remembered by structure."""
    key = "pieces", sources, targets, stopped
    known: Sequence[Piece] | None = record.step.programs.get(key)
    if known is not None:
        return known
    types, operations = record.types(), record.operations()
    chosen = on_the_way(operations, types, sources, targets)
    reached = set(sources)
    for i in chosen:
        if not reached.isdisjoint(operations[i].args):
            results = operations[i].results
            reached.update(r for r in results if _jax.has_gradient(types[r]) and r not in stopped)
    # Each rule is by itself; what is between two is one piece.
    numbers = itertools.accumulate(is_on_values(operations[i]) for i in chosen)
    parts: dict[tuple[int, bool], list[int]] = {}
    for i, number in zip(chosen, numbers):
        parts.setdefault((number, is_on_values(operations[i])), []).append(i)
    pieces = [
        _piece(part, [operations[i] for i in part], is_rule, reached, sources)
        for (_, is_rule), part in parts.items()
    ]
    record.step.programs[key] = tuple(reversed(pieces))
    return tuple(reversed(pieces))


def _piece(
    numbers: Sequence[int],
    operations: Sequence[Operation],
    is_rule: bool,
    reached: Collection[int],
    sources: Collection[int],
) -> Piece:
    results = tuple([slot for operation in operations for slot in operation.results])
    args = tuple([slot for operation in operations for slot in operation.args])
    if not is_rule:
        inner = set(results).difference(sources)
        args = tuple(dict.fromkeys(s for s in args if s in reached and s not in inner))
    active = tuple([slot in reached for slot in args])
    return Piece(tuple(numbers), is_rule, args, results, active)


def pull_back_pieces(
    record: Record,
    pieces: Sequence[Piece],
    ends: tuple[tuple[int, ...], tuple[int, ...]],
    seeds: Sequence[Any],
    run: RunPiece,
    *,
    sparse: bool,
    stopped: frozenset[int],
    aggregate: Aggregation,
) -> list[Any]:
    """The cotangents of sources, from those of targets; None where none has arrived.

    Args:
      record, pieces: from `pieces_between`.
      ends: the slots of the sources, and of the targets.
      seeds: of each target.
      run: of a piece that is no rule.
      sparse: whether sources that nothing has computed may get slices.
      stopped, aggregate: as for `pull_back`; `stopped` are slots.
    """
    sources, targets = ends
    made = {slot for piece in pieces for slot in piece.results}
    tables = set(sources).difference(made) if sparse else set()
    found: dict[int, Any] = {}

    def add(slot: int, ct: Any) -> None:
        found[slot] = sum_of_known([found.get(slot), ct], aggregate)

    for slot, seed in zip(targets, seeds, strict=True):
        add(slot, seed)
    for piece in pieces:
        given = [s for s in piece.results if found.get(s) is not None and s not in stopped]
        if not given:
            continue
        may_be_slices = tuple([slot in tables for slot in piece.args])
        if piece.is_rule:
            known = {slot: found[slot] for slot in given}
            rule = record.rules[piece.results[0]]
            terms = rule.pull_back([known.get(slot) for slot in piece.results], may_be_slices)
        else:
            starts = [found.pop(slot) if slot in piece.args else found[slot] for slot in given]
            terms = run(piece, given, starts, may_be_slices)
        for slot, ct, is_active in zip(piece.args, terms, piece.active, strict=True):
            if ct is not None and is_active:
                add(slot, ct)
    return [found.get(slot) for slot in sources]
