"""Differentiates with respect to sources: arrays, Variables, and arrays of flax.nnx modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, compress, islice
from typing import Any

import jax

from tracegrad import _jax
from tracegrad._jax.caches import of_program
from tracegrad.differentiation.pull_back import Aggregation, sum_present
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.ir.wording import listed
from tracegrad.tape.cotangents import Derivative, differentiate_record
from tracegrad.tape.record import Record
from tracegrad.tape.recorded_rules import RecordedRule
from tracegrad.tracing.argument_paths import argument_path, known_by_path
from tracegrad.tracing.in_force import rules_in_force
from tracegrad.tracing.leaves import Leaf, leaves_of
from tracegrad.tracing.nnx_objects import nnx
from tracegrad.variables.trees import is_variable
from tracegrad.variables.variable import Variable


def differentiate(
    record: Record,
    sources: Sequence[Any],
    targets: Sequence[Any],
    variables: Mapping[Variable, Any],
    derivative: Derivative,
    seeds: Sequence[Any],
    tree: Any,
) -> list[Any]:
    """Returns the derivative for each source; None for a source that is connected to no target.

    Args:
      sources: arrays and Variables.
      targets: arrays.
      variables: maps the Variables among the targets to their values.
      derivative, seeds: as for `differentiate_record`.
      tree: the user's tree of sources.
    """
    # A Variable may have been read as several arrays, for example before and after an assignment.
    arrays = [record.reads_of(source) for source in sources]
    if variables:
        arrays = [_with_target(variables, source, reads) for source, reads in zip(sources, arrays)]
    with _named_by_place(tree) if rules_in_force() else nullcontext():
        found = differentiate_arrays(record, list(chain(*arrays)), targets, derivative, seeds)
    if set(map(len, arrays)) == {1}:  # the common case
        return found
    terms = iter(found)
    return [sum_present(list(islice(terms, len(reads)))) for reads in arrays]


def _named_by_place(tree: Any) -> AbstractContextManager[None]:
    """A block in which rules find the arrays of a tree of sources by paths: ``sources.0.kernel``,
    unless an array stands for an argument of the traced function."""
    leaves = jax.tree.leaves(tree, is_leaf=is_variable)  # a Variable has its own name
    nameless = [isinstance(leaf, jax.Array) and not argument_path(leaf) for leaf in leaves]
    names = [leaf.within("sources").name for leaf in leaves_of(tree)]
    return known_by_path(list(compress(leaves, nameless)), list(compress(names, nameless)))


def _with_target(variables: Mapping[Variable, Any], source: Any, reads: list[Any]) -> list[Any]:
    """Adds the value of a Variable that is a source and a target to the arrays read from it."""
    value = variables.get(source) if isinstance(source, Variable) else None
    is_new = value is not None and all(value is not read for read in reads)
    return [*reads, value] if is_new else reads


def differentiate_arrays(
    record: Record,
    sources: Sequence[Any],
    targets: Sequence[Any],
    derivative: Derivative,
    seeds: Sequence[Any] = (),
    stops: Sequence[Any] = (),
    aggregate: Aggregation | None = None,
    gated: bool = False,
) -> list[Any]:
    """Returns the derivative for each source array; None for an array that is not connected, or not
    followed by the record. `stops`: arrays that count as constants; other arguments: see
    `differentiate_record`."""
    # The gradient of a source that is a target is its seed, whether it is followed or not.
    target_ids = {id(target) for target in targets}
    source_slots: dict[int, int] = {}  # by the id of the source
    for source in sources:
        if (id(source) in target_ids or record.follows(source)) and _jax.has_gradient(source):
            source_slots[id(source)] = record.slot(source)
    followed = [i for i, t in enumerate(targets) if id(t) in source_slots or record.follows(t)]
    if not followed or not source_slots:
        return [None] * len(sources)
    starts = tuple(source_slots.values())
    ends = tuple([record.slot(targets[i]) for i in followed])
    seeds = [seeds[i] for i in followed] if seeds else []
    stopped = frozenset(map(record.slot, stops))
    found = differentiate_record(record, starts, ends, derivative, seeds, stopped, aggregate, gated)
    if len(source_slots) == len(sources):  # every source has a slot of its own
        return found
    by_source = dict(zip(source_slots, found, strict=True))
    return [by_source.get(id(source)) for source in sources]


# ------------------------------------------------------------------------- the state of nnx modules

# A transformed function that takes a module (`nnx.jit`, `nnx.remat`, `nnx.custom_vjp`, and
# `nnx.scan` with such a function in its body) returns all state of the module, also unchanged
# state. So the module has new arrays after the call, with the same values. The gradient of such an
# array is the gradient of the array that the module had before the call.


def before_calls(record: Record, sources: Any) -> dict[int, Any]:
    """Maps the id of each module array that calls have returned unchanged to the array that the
    module had before the calls. `sources`: the tree of sources, which shows the modules."""
    if nnx() is None:
        return {}
    came_from = dict(_returned_slots(record))
    if not came_from:
        return {}

    def before(slot: int) -> int:
        while slot in came_from:
            slot = came_from[slot]
        return slot

    def slot_of(array: Any) -> Any:
        return record.tracked.get(id(array), record.others.get(id(array)))

    arrays = jax.tree.leaves(sources)
    return {
        id(array): record.arrays[before(record.slot(array))]
        for array, leaf in zip(arrays, leaves_of(sources), strict=True)
        if leaf.is_module_state and slot_of(array) in came_from
    }


def _returned_slots(record: Record) -> Iterator[tuple[int, int]]:
    """Yields (slot of the result, slot of the operand) for each result that is an operand,
    unchanged."""
    for entry in record.entries:
        computation = entry.computation
        if not isinstance(computation, RecordedRule):
            shift = len(computation.captured)
            for place, at in _returned_operands_of(computation).items():
                yield entry.results[place], entry.args[shift + at]


def _returned_operands_of(call: Any) -> Mapping[int, int]:
    """Maps the position of each result of an operation that is an operand, unchanged, to the
    position of the operand. `call`: a computation or an equation.

    Looks into the programs of the operation. A loop returns an operand if each step returns it: a
    carry, or slices. A conditional returns an operand if all branches return it.
    """
    primitive, params = call.primitive, call.params
    if primitive not in _RETURNING_OPERANDS:
        return {}
    first, *others = [_find_returned_inputs(program) for _, program in _jax.sub_programs(params)]
    if primitive is _jax.COND:  # its first operand is the index of the branch
        return {
            place: 1 + at
            for place, at in first.items()
            if all((place, at) in o.items() for o in others)
        }
    if primitive is _jax.SCAN:
        constants, carried = _jax.scan_split(params)
        return {
            place: at
            for place, at in first.items()
            if (at == constants + place if place < carried else at >= constants + carried)
        }
    if primitive is _jax.WHILE:
        constants, shift = params["body_nconsts"], params["cond_nconsts"]
        steps = _find_returned_inputs(params["body_jaxpr"])
        return {place: shift + at for place, at in steps.items() if at == constants + place}
    return first


_RETURNING_OPERANDS = frozenset(
    {
        _jax.JIT,
        _jax.REMAT,
        _jax.CUSTOM_JVP,
        _jax.CUSTOM_VJP,
        _jax.SCAN,
        _jax.COND,
        _jax.WHILE,
    }
)


@of_program
def _find_returned_inputs(program: Any) -> Mapping[int, int]:
    """Maps positions of the program's outputs to positions of its inputs."""
    open_form = _jax.opened(program)
    at = {variable: place for place, variable in enumerate(open_form.invars)}
    for equation in open_form.eqns:
        for place, inner in _returned_operands_of(equation).items():
            operand = equation.invars[inner]
            if not hasattr(operand, "val") and operand in at:
                at[equation.outvars[place]] = at[operand]
    return {
        place: at[atom]
        for place, atom in enumerate(open_form.outvars)
        if not hasattr(atom, "val") and atom in at
    }


# ------------------------------------------------------------- warnings of missing gradients


def warn_of_unwatched(
    record: Record,
    arrays: Sequence[Any],
    leaves: Sequence[Leaf],
    found: Sequence[Any],
    role: str = "sources",
) -> None:
    """Warns, at the user's line, of sources whose gradients are None since the sources were used
    before they were watched. `role`: the name of the argument with the sources.

    Does not warn of Variables, of arrays used while the tape did not record, and of state that a
    module does not train.
    """
    names = [
        f"{role}.{leaf.name}" if leaf.name else "the source"
        for array, leaf, gradient in zip(arrays, leaves, found, strict=True)
        if gradient is None and _is_unwatched(record, array, leaf)
    ]
    if not names:
        return
    what_is, them, they_were = f"gradients of {listed(names, 3)} are", "them", "they were"
    if len(names) == 1:
        what_is, them, they_were = f"gradient of {names[0]} is", "it", "it was"
    warn_where_called(
        f"the {what_is} None, since the tape did not watch {them} when {they_were} used: call "
        "tape.watch on the arrays, or on the model that contains them, in the tape's block and "
        "before their first use",
        UserWarning,
    )


def warn_of_unseen() -> None:
    """Warns, at the user's line, that the tape does not see the operations that compute a
    target."""
    warn_where_called(
        "the tape does not see what computes the target, so that its gradients are None: the "
        "target is computed in a function that is being traced in the tape's block (by jax.jit, "
        "jax.vmap, a loop), and this tape records the call of that function as one operation. Open "
        "a tape in that function, or ask for gradients after the call",
        UserWarning,
    )


def _is_unwatched(record: Record, array: Any, leaf: Leaf) -> bool:
    if not isinstance(array, jax.Array) or not _jax.has_gradient(array):
        return False
    if leaf.is_module_state:  # the array may be new, from a call that was not recorded
        return leaf.is_trained and id(array) not in record.tracked
    return record.was_used_unfollowed(array)
