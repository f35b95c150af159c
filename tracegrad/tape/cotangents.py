"""The cotangents of what a record has, by compiled programs that are remembered by structure.

Where a rule runs on values (see `Rule`) the backward pass is in pieces: the rule is Python code,
called between the programs of what was recorded after it and before it.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.lookups import with_slices
from tracegrad.differentiation.pull_back import Aggregation, running_sum
from tracegrad.tape.backward import Traced, sum_of_known, trace_backward
from tracegrad.tape.keys import Structure
from tracegrad.tape.programs import PROGRAMS
from tracegrad.tape.record import ON_VALUES, Block, Operation, Record, block_between, on_the_way
from tracegrad.tape.recorder import Recorder, with_stand_ins
from tracegrad.tape.replay import NOTHING, Replay, replay_of
from tracegrad.tracing.in_force import rules_in_force

# From the arrays of a block and the seeds of its targets to the cotangents of the sources.
Backward = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


@dataclass(frozen=True, eq=False)
class Kind:
    """What is made of a backward pass: how it is run, and what zeros have what shape."""

    run: Callable[[Backward, Sequence[Any], Sequence[Any], Sequence[Any]], list[Any]]
    zeros: Callable[[Sequence[Any], Any], Any]
    sparse: bool = False


def _run_gradient(
    backward: Backward, arrays: Sequence[Any], seeds: Sequence[Any], types: Sequence[Any]
) -> list[Any]:
    return backward(arrays, seeds)


def _run_jacobian(
    backward: Backward, arrays: Sequence[Any], seeds: Sequence[Any], types: Sequence[Any]
) -> list[Any]:
    (target,) = types
    rows = _basis(target.shape, target.dtype)
    found = jax.vmap(lambda seed: backward(arrays, [seed]))(rows)
    return [ct.reshape(*target.shape, *ct.shape[1:]) for ct in found]


def _run_batch_jacobian(
    backward: Backward, arrays: Sequence[Any], seeds: Sequence[Any], types: Sequence[Any]
) -> list[Any]:
    (target,) = types
    batch, *rest = target.shape
    rows = _basis(rest, target.dtype)
    # The same element of every example at once: none depends on another example.
    found = jax.vmap(lambda row: backward(arrays, [jnp.broadcast_to(row, target.shape)]))(rows)
    return [jnp.moveaxis(ct, 1, 0).reshape(batch, *rest, *ct.shape[2:]) for ct in found]


def _basis(shape: Sequence[int], dtype: Any) -> Any:
    """One array of the shape for each of its elements, which alone is 1."""
    size = math.prod(shape)
    return jnp.eye(size, dtype=dtype).reshape(size, *shape)


GRADIENT = Kind(_run_gradient, lambda targets, leaf: _zeros((), leaf))
SPARSE_GRADIENT = replace(GRADIENT, sparse=True)
JACOBIAN = Kind(_run_jacobian, lambda targets, leaf: _zeros(jnp.shape(targets[0]), leaf))
BATCH_JACOBIAN = Kind(
    _run_batch_jacobian, lambda targets, leaf: _zeros(jnp.shape(targets[0]), leaf, skipped=1)
)


def _zeros(leading: Sequence[int], leaf: Any, skipped: int = 0) -> Any:
    return jnp.zeros((*leading, *leaf.shape[skipped:]), leaf.dtype)


@dataclass(frozen=True, eq=False)
class _Compiled:
    """The compiled backward of a structure: ``run(*arrays needed, *given seeds)``.

    Attributes:
      connected: which sources it has a gradient for.
      needed: the positions in the block of the arrays that it takes.
      replay: what of the block it runs again.
    """

    run: Callable[..., list[Any]]
    connected: tuple[bool, ...]
    needed: tuple[int, ...]
    replay: Replay
    key: Any


@dataclass(frozen=True)
class _Placed:
    """A compiled backward for records of one structure: what it takes has these slots there."""

    compiled: weakref.ref[_Compiled]
    slots: tuple[int, ...]
    stood_in: frozenset[int]


class _Ready(NamedTuple):
    """From the arrays of these slots (stand-ins for some of them: see `with_stand_in`) and the
    seeds to the cotangents of the connected sources."""

    run: Callable[..., list[Any]]
    connected: tuple[bool, ...]
    slots: tuple[int, ...]
    stood_in: frozenset[int]


def cotangents(
    record: Record,
    sources: tuple[int, ...],
    targets: tuple[int, ...],
    kind: Kind,
    seeds: Sequence[Any] = (),
    stopped: frozenset[int] = frozenset(),
    aggregate: Aggregation = running_sum,
    gated: bool = False,
) -> list[Any]:
    """The cotangents of sources; None for one that nothing connects to a target.

    Args:
      record, sources, targets: the slots of arrays in a record.
      kind: what is made of the backward pass.
      seeds: for each target what it starts from (None: ones); a Jacobian has none.
      stopped, aggregate, gated: as for `pull_back`; `stopped` are slots.
    """
    how = _How(stopped, aggregate, gated)
    pieces = _pieces(record, sources, targets, stopped) if record.rules else ()
    if any(piece.is_rule for piece in pieces):
        return _piecewise(record, pieces, sources, targets, kind, seeds, how)
    given = tuple([seed is not None for seed in seeds])
    sparse = (kind.sparse,) * len(sources)
    ready = _compiled(record, sources, targets, kind, given, how, sparse)
    return _run(record, ready, seeds)


class _How(NamedTuple):
    """How cotangents are pulled back: see `pull_back`."""

    stopped: frozenset[int]
    aggregate: Aggregation
    gated: bool


def _run(record: Record, ready: _Ready, seeds: Sequence[Any]) -> list[Any]:
    if not any(ready.connected):
        return [None] * len(ready.connected)
    arrays = [record.arrays[slot] for slot in ready.slots]
    if ready.stood_in:
        arrays = with_stand_ins(arrays, [slot in ready.stood_in for slot in ready.slots])
    found = iter(ready.run(*arrays, *[seed for seed in seeds if seed is not None]))
    return [next(found) if linked else None for linked in ready.connected]


def _compiled(
    record: Record,
    sources: tuple[int, ...],
    targets: tuple[int, ...],
    kind: Kind,
    given: tuple[bool, ...],
    how: _How,
    sparse: tuple[bool, ...],
    piece: _Piece | None = None,
) -> _Ready:
    """The compiled backward of a record's structure, remembered by that.

    Args:
      given: for each target whether it has a seed, which comes after the arrays; else ones.
      sparse: for each source whether its cotangent may be slices.
      piece: of which part of the record; default: all of it.
    """
    # One that only runs serves every block of the same gradient; one that may be differentiated in
    # its turn (by another tape, or a transformation) only those of the same derivatives.
    runs = _jax.is_top_level()
    rules = rules_in_force()
    here = kind, sources, targets, given, runs, rules, how, sparse
    programs = record.step.programs if piece is None else piece.programs
    placed = programs.get(here)
    if placed is not None:
        before: _Compiled | None = placed.compiled()
        kept: object = None if before is None else PROGRAMS.get(before.key)
        if before is not None and kept is before:
            return _Ready(before.run, before.connected, placed.slots, placed.stood_in)
    operations = record.operations()
    if piece is not None:
        operations = [operations[i] for i in piece.operations]
    block = block_between(operations, record.types(), sources, targets)
    stops = tuple([i for i, slot in enumerate(block.slots) if slot in how.stopped])
    replay = NOTHING if runs else replay_of(block, stops)
    structure = block.key if runs else block.exact_key
    key = Structure((kind, given, structure, rules, stops, *how[1:], sparse, replay))
    known: _Compiled | None = PROGRAMS.get(key)
    if known is None:
        traced = trace_backward(
            block, stopped=stops, aggregate=how.aggregate, gated=how.gated, replay=replay
        )
        known = _compile(block, traced, kind, given, sparse, replay, key)
        # A rule made under a transformation may hold values of it, which would outlive it here.
        rule_free = all(o.computation.rule is None for o in block.operations)
        if rule_free or not _is_transforming():
            PROGRAMS.put(key, known)
    slots = tuple([block.slots[place] for place in known.needed])
    stood_in = frozenset([block.slots[place] for place in known.replay.slots])
    if record.step.is_shared:
        if len(programs) > 64:
            programs.clear()
        programs[here] = _Placed(weakref.ref(known), slots, stood_in)
    return _Ready(known.run, known.connected, slots, stood_in)


def _is_transforming() -> bool:
    trace = _jax.current_trace(None)
    while isinstance(trace, Recorder):
        trace = trace.parent_trace
    return not isinstance(trace, _jax.TopLevelTrace)


def _compile(
    block: Block,
    traced: Traced,
    kind: Kind,
    given: Sequence[bool],
    sparse: Sequence[bool],
    replay: Replay,
    key: Any,
) -> _Compiled:
    program, connected = traced.program, traced.connected
    run = jax.extend.core.jaxpr_as_fun(program)
    if any(sparse):
        run = with_slices(program, sparse)
    types = [block.types[slot] for slot in block.targets]
    # Zeros stand for what nothing is computed of. (Of random keys there are none.)
    needed = [
        place
        for place, aval in enumerate(block.types)
        if traced.needed[place] or not isinstance(aval.dtype, np.dtype)
    ]
    taken = set(needed)
    absent = [(i, aval) for i, aval in enumerate(block.types) if i not in taken]

    def connected_only(arrays: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
        found = run(*arrays, *seeds)
        return [ct for ct, linked in zip(found, connected, strict=True) if linked]

    def backward(*arrays_and_seeds: Any) -> list[Any]:
        arrays = dict(zip(needed, arrays_and_seeds))
        arrays.update((i, jnp.zeros(aval.shape, aval.dtype)) for i, aval in absent)
        rest = iter(arrays_and_seeds[len(needed) :])
        seeds = [
            next(rest) if is_given else jnp.ones(aval.shape, aval.dtype)
            for aval, is_given in zip(types, given)  # a Jacobian has none
        ]
        return kind.run(connected_only, [arrays[i] for i in range(len(arrays))], seeds, types)

    return _Compiled(jax.jit(backward), connected, tuple(needed), replay, key)


# ------------------------------------------------------------------------------- rules on values


@dataclass(frozen=True, eq=False)
class _Piece:
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


def _pieces(
    record: Record, sources: tuple[int, ...], targets: tuple[int, ...], stopped: frozenset[int]
) -> Sequence[_Piece]:
    """The pieces of a backward pass, in the order in which they run; remembered by structure."""
    key = "pieces", sources, targets, stopped
    known: Sequence[_Piece] | None = record.step.programs.get(key)
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
    numbers = itertools.accumulate(_has_rule(operations[i]) for i in chosen)
    parts: dict[tuple[int, bool], list[int]] = {}
    for i, number in zip(chosen, numbers):
        parts.setdefault((number, _has_rule(operations[i])), []).append(i)
    pieces = [
        _piece(part, [operations[i] for i in part], is_rule, reached, sources)
        for (_, is_rule), part in parts.items()
    ]
    record.step.programs[key] = tuple(reversed(pieces))
    return tuple(reversed(pieces))


def _has_rule(operation: Operation) -> bool:
    return operation.computation.primitive is ON_VALUES


def _piece(
    numbers: Sequence[int],
    operations: Sequence[Operation],
    is_rule: bool,
    reached: Collection[int],
    sources: Collection[int],
) -> _Piece:
    results = tuple([slot for operation in operations for slot in operation.results])
    args = tuple([slot for operation in operations for slot in operation.args])
    if not is_rule:
        inner = set(results).difference(sources)
        args = tuple(dict.fromkeys(s for s in args if s in reached and s not in inner))
    active = tuple([slot in reached for slot in args])
    return _Piece(tuple(numbers), is_rule, args, results, active)


def _piecewise(
    record: Record,
    pieces: Sequence[_Piece],
    sources: tuple[int, ...],
    targets: tuple[int, ...],
    kind: Kind,
    seeds: Sequence[Any],
    how: _How,
) -> list[Any]:
    """The same where rules on values are on the way: piece by piece."""
    made = {slot for piece in pieces for slot in piece.results}
    tables = set(sources).difference(made) if kind.sparse else set()
    connected: list[bool] = []

    def backward(_: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        found: dict[int, Any] = {}

        def add(slot: int, ct: Any) -> None:
            found[slot] = sum_of_known([found.get(slot), ct], how.aggregate)

        for slot, seed in zip(targets, given, strict=True):
            add(slot, seed)
        for piece in pieces:
            ends = [s for s in piece.results if found.get(s) is not None and s not in how.stopped]
            if not ends:
                continue
            sparse = tuple([slot in tables for slot in piece.args])
            if piece.is_rule:
                known = {slot: found[slot] for slot in ends}
                rule = record.rules[piece.results[0]]
                terms = rule.pull_back([known.get(slot) for slot in piece.results], sparse)
            else:
                starts = [found.pop(slot) if slot in piece.args else found[slot] for slot in ends]
                ready = _compiled(
                    record,
                    piece.args,
                    tuple(ends),
                    GRADIENT,
                    (True,) * len(ends),
                    how,
                    sparse,
                    piece,
                )
                terms = _run(record, ready, starts)
            for slot, ct, is_active in zip(piece.args, terms, piece.active, strict=True):
                if ct is not None and is_active:
                    add(slot, ct)
        connected[:] = [found.get(slot) is not None for slot in sources]
        return [ct for slot in sources if (ct := found.get(slot)) is not None]

    types = [jax.typeof(record.arrays[slot]) for slot in targets]
    given = [
        jnp.ones(aval.shape, aval.dtype) if seed is None else seed
        for aval, seed in zip(types, seeds)  # a Jacobian has none
    ]
    results = iter(kind.run(backward, (), given, types))
    return [next(results) if linked else None for linked in connected]
