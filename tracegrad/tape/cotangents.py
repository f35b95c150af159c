"""The cotangents of what a record has, by compiled programs that are remembered by structure."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.lookups import with_slices
from tracegrad.differentiation.pull_back import Aggregation, running_sum
from tracegrad.tape.backward import Traced, trace_backward
from tracegrad.tape.block import Block, Operation, block_between, following
from tracegrad.tape.keys import PROGRAMS, Structure
from tracegrad.tape.pieces import Piece, pieces_between, pull_back_pieces
from tracegrad.tape.record import Record
from tracegrad.tape.recorder import Recorder
from tracegrad.tape.recorders import not_overridden, with_stand_ins
from tracegrad.tape.replay import NOTHING, Replay, has_a_rule, replay_of
from tracegrad.tape.rules_on_values import as_traced, refusing_values
from tracegrad.tracing.in_force import Force, differentiating, rules_for_recorded, rules_in_force

# From the arrays of a block and the seeds of its targets to the cotangents of the sources.
Backward = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


@dataclass(frozen=True, eq=False)
class Derivative:
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
    rows = _basis(target.shape, target)
    found = jax.vmap(lambda seed: backward(arrays, [seed]))(rows)
    return [ct.reshape(*target.shape, *ct.shape[1:]) for ct in found]


def _run_batch_jacobian(
    backward: Backward, arrays: Sequence[Any], seeds: Sequence[Any], types: Sequence[Any]
) -> list[Any]:
    (target,) = types
    batch, *rest = target.shape
    rows = _basis(rest, target)
    # The same element of every example at once: none depends on another example.
    found = jax.vmap(lambda row: backward(arrays, [jnp.broadcast_to(row, target.shape)]))(rows)
    return [jnp.moveaxis(ct, 1, 0).reshape(batch, *rest, *ct.shape[2:]) for ct in found]


def _basis(shape: Sequence[int], like: Any) -> Any:
    """One array of the shape for each of its elements, which alone is 1."""
    size = math.prod(shape)
    return _jax.varying_as(jnp.eye(size, dtype=like.dtype).reshape(size, *shape), like)


def _ones(aval: Any) -> Any:
    return _jax.varying_as(jnp.ones(aval.shape, aval.dtype), aval)


GRADIENT = Derivative(_run_gradient, lambda targets, leaf: _zeros((), leaf))
SPARSE_GRADIENT = replace(GRADIENT, sparse=True)
JACOBIAN = Derivative(_run_jacobian, lambda targets, leaf: _zeros(jnp.shape(targets[0]), leaf))
BATCH_JACOBIAN = Derivative(
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

    def slots(self, block: Block) -> _Slots:
        """Those of what it takes, in the record that a block is of."""
        slots = tuple([block.slots[place] for place in self.needed])
        return _Slots(slots, tuple([place in self.replay.slots for place in self.needed]))


class _Slots(NamedTuple):
    """Where in a record the arrays are that a compiled backward takes, and in whose place it gets
    stand-ins (see `with_stand_in`)."""

    taken: tuple[int, ...]
    stood_in: tuple[bool, ...]


def cotangents(
    record: Record,
    sources: tuple[int, ...],
    targets: tuple[int, ...],
    kind: Derivative,
    seeds: Sequence[Any] = (),
    stopped: frozenset[int] = frozenset(),
    aggregate: Aggregation = running_sum,
    gated: bool = False,
    inline: bool = False,
) -> list[Any]:
    """The cotangents of sources; None for one that nothing connects to a target.

    Args:
      record, sources, targets: the slots of arrays in a record.
      kind: what is made of the backward pass.
      seeds: for each target what it starts from (None: ones); a Jacobian has none.
      stopped, aggregate, gated: as for `pull_back`; `stopped` are slots.
      inline: whether to bind the operations one by one, so that gradients of gradients find each in
        a function that is being traced.
    """
    request = _Request(
        kind,
        tuple([seed is not None for seed in seeds]),
        (kind.sparse,) * len(sources),
        stopped,
        aggregate,
        gated,
        inline,
        _jax.is_top_level(),
        forces := rules_for_recorded(),
        _jax.examples_at_once() if forces else 1,
    )
    ends = sources, targets
    if inline:
        return _anew(record.operations(), record.types(), record.arrays, ends, seeds, request)
    if record.rules:
        pieces = pieces_between(record, sources, targets, stopped)
        rules = [i for piece in pieces if piece.is_rule for i in piece.operations]
        if rules:
            if not request.only_runs and _is_behind_a_rule(record, max(rules), sources):
                return _as_traced(record, rules, ends, seeds, request)
            return _piecewise(record, pieces, ends, seeds, request)
    return _run(record.arrays, *_compiled(record, sources, targets, request), seeds)


class _Request(NamedTuple):
    """What is asked for of a backward pass.

    Attributes:
      kind, stopped, aggregate, gated, inline: as of `cotangents`.
      given: for each target whether it has a seed, which comes after the arrays; else ones.
      sparse: for each source whether its cotangent may be slices.
      only_runs: whether it is not differentiated in its turn (by another tape, or a
        transformation): then it serves every block of the same gradient, else only those of the
        same derivatives.
      rules: those in force.
      examples: of how many it is at once, in the `jax.vmap`s around it, where a rule may ask.
    """

    kind: Derivative
    given: tuple[bool, ...]
    sparse: tuple[bool, ...]
    stopped: frozenset[int]
    aggregate: Aggregation
    gated: bool
    inline: bool
    only_runs: bool
    rules: tuple[Force, ...]
    examples: int


def _run(
    by_slot: Sequence[Any], compiled: _Compiled, slots: _Slots, seeds: Sequence[Any]
) -> list[Any]:
    if not any(compiled.connected):
        return [None] * len(compiled.connected)
    arrays = list(map(by_slot.__getitem__, slots.taken))
    if any(slots.stood_in):
        arrays = with_stand_ins(arrays, slots.stood_in)
    arrays += [seed for seed in seeds if seed is not None]

    def run(backward: Callable[..., list[Any]]) -> list[Any]:
        return (not_overridden()(backward) if rules_in_force() else backward)(*arrays)

    try:
        found = run(compiled.run)
    except ValueError:
        if not _lie_apart(by_slot):
            raise
        found = run(inspect.unwrap(compiled.run))  # operation by operation, as they were computed
    if all(compiled.connected):
        return found
    each = iter(found)
    return [next(each) if linked else None for linked in compiled.connected]


def _lie_apart(arrays: Sequence[Any]) -> bool:
    """Whether arrays are on different devices, for which JAX compiles no program."""
    committed = [x for x in arrays if not _jax.is_tracer(x) and getattr(x, "committed", False)]
    return len({frozenset(x.sharding.device_set) for x in committed}) > 1


def _anew(
    operations: Sequence[Operation],
    types: Sequence[Any],
    arrays: Sequence[Any],
    ends: tuple[tuple[int, ...], tuple[int, ...]],
    seeds: Sequence[Any],
    request: _Request,
) -> list[Any]:
    """The cotangents in operations of which no record remembers what was compiled."""
    block = block_between(operations, types, *ends)
    compiled = _of_block(block, request)
    return _run(arrays, compiled, compiled.slots(block), seeds)


def _compiled(
    record: Record,
    sources: tuple[int, ...],
    targets: tuple[int, ...],
    request: _Request,
    piece: Piece | None = None,
) -> tuple[_Compiled, _Slots]:
    """The compiled backward of a record's structure (of a piece of it), remembered by that."""
    here = sources, targets, request
    programs = record.step.programs if piece is None else piece.programs
    known_here = programs.get(here)
    if known_here is not None:
        reference, slots = known_here
        before: _Compiled | None = reference()
        kept: object = None if before is None else PROGRAMS.get(before.key)
        if before is not None and kept is before:
            return before, slots
    operations = record.operations()
    if piece is not None:
        operations = [operations[i] for i in piece.operations]
    block = block_between(operations, record.types(), sources, targets)
    known = _of_block(block, request)
    slots = known.slots(block)
    if record.step.is_shared:
        if len(programs) > 64:
            programs.clear()
        programs[here] = weakref.ref(known), slots
    return known, slots


def _of_block(block: Block, request: _Request) -> _Compiled:
    """The compiled backward of a block, remembered by its structure."""
    stops = frozenset([i for i, slot in enumerate(block.slots) if slot in request.stopped])
    replay = NOTHING if request.only_runs else replay_of(block, stops, request.rules)
    structure = block.key if request.only_runs else block.exact_key
    key = Structure((request._replace(stopped=stops, only_runs=False), structure, replay))
    known: _Compiled | None = PROGRAMS.get(key)
    if known is None:
        with differentiating():
            traced = trace_backward(
                block,
                stopped=stops,
                aggregate=request.aggregate,
                gated=request.gated,
                replay=replay,
                rules=request.rules,
            )
        known = _compile(block, traced, request, replay, key)
        # A rule made under a transformation may hold values of it, which would outlive it here.
        rule_free = all(o.computation.rule is None for o in block.operations)
        outside = _jax.current_trace_outside_of(Recorder)
        if not request.inline and (rule_free or isinstance(outside, _jax.TopLevelTrace)):
            PROGRAMS.put(key, known)
    return known


def _compile(
    block: Block, traced: Traced, request: _Request, replay: Replay, key: Structure
) -> _Compiled:
    program, connected = traced.program, traced.connected
    run = jax.extend.core.jaxpr_as_fun(program)
    if any(request.sparse):
        run = with_slices(program, request.sparse)
    types = [block.types[slot] for slot in block.targets]
    # Zeros stand for what nothing is computed of. (Of random keys there are none.)
    needed = [
        place
        for place, aval in enumerate(block.types)
        if traced.needed[place] or request.inline or not isinstance(aval.dtype, np.dtype)
    ]
    taken = set(needed)
    absent = [(i, aval) for i, aval in enumerate(block.types) if i not in taken]

    def connected_only(arrays: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
        found = run(*arrays, *seeds)
        return [ct for ct, linked in zip(found, connected, strict=True) if linked]

    def backward(*arrays_and_seeds: Any) -> list[Any]:
        arrays = dict(zip(needed, arrays_and_seeds))
        arrays.update((i, _jax.varying_as(_zeros((), aval), aval)) for i, aval in absent)
        rest = iter(arrays_and_seeds[len(needed) :])
        seeds = [
            next(rest) if is_given else _ones(aval)
            for aval, is_given in zip(types, request.given)  # a Jacobian has none
        ]
        every = [arrays[i] for i in range(len(arrays))]
        return request.kind.run(connected_only, every, seeds, types)

    run_all = backward if request.inline else jax.jit(backward)
    return _Compiled(run_all, connected, tuple(needed), replay, key)


# ------------------------------------------------------------------------------- rules on values


def _piecewise(
    record: Record,
    pieces: Sequence[Piece],
    ends: tuple[tuple[int, ...], tuple[int, ...]],
    seeds: Sequence[Any],
    request: _Request,
) -> list[Any]:
    """The same where rules on values are on the way: piece by piece."""
    kind, connected = request.kind, list[bool]()

    def run(
        piece: Piece, ends: Sequence[int], starts: Sequence[Any], sparse: tuple[bool, ...]
    ) -> list[Any]:
        of_piece = request._replace(kind=GRADIENT, given=(True,) * len(ends), sparse=sparse)
        ready = _compiled(record, piece.args, tuple(ends), of_piece, piece)
        return _run(record.arrays, *ready, starts)

    def backward(_: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        found = pull_back_pieces(
            record,
            pieces,
            ends,
            given,
            run,
            sparse=kind.sparse,
            stopped=request.stopped,
            aggregate=request.aggregate,
        )
        connected[:] = [ct is not None for ct in found]
        return [ct for ct in found if ct is not None]

    types = [jax.typeof(record.arrays[slot]) for slot in ends[1]]
    given = [
        _ones(aval) if seed is None else seed
        for aval, seed in zip(types, seeds)  # a Jacobian has none
    ]
    results = iter(kind.run(backward, (), given, types))
    return [next(results) if linked else None for linked in connected]


def _is_behind_a_rule(record: Record, last: int, sources: Collection[int]) -> bool:
    """Whether an operation before some rule on values has one of JAX's.

    Where the cotangents are differentiated in their turn, what the rule on values has been given,
    and what it closes over, counts as the forward pass of that other rule computes it (see
    `replay`). So it is taken as it is where it is traced, and runs again as a part of one program.
    """
    before = following(record.operations()[:last], sources)
    return any(has_a_rule(operation.computation) for operation in before)


def _as_traced(
    record: Record,
    rules: Collection[int],
    ends: tuple[tuple[int, ...], tuple[int, ...]],
    seeds: Sequence[Any],
    request: _Request,
) -> list[Any]:
    """The same with these operations, which have rules on values, as they are where they are
    traced."""
    operations, types, arrays = list[Operation](), record.types(), list(record.arrays)
    names: dict[str, None] = {}
    for i, operation in enumerate(record.operations()):
        if i in rules:
            rule = record.rules[operation.results[0]]
            names[rule.name] = None
            operation = as_traced(operation, rule, types, arrays, record.slots)
        operations.append(operation)
    with refusing_values(list(names)):
        return _anew(operations, types, arrays, ends, seeds, request)
