"""What a tape's sources have of flax.nnx: the state of modules, which is more than its arrays.

A transformed function that is given a module (`nnx.jit`, `nnx.remat`, `nnx.custom_vjp`) gives all
of its state back, what it has not changed too: the module has other arrays after the call, and is
what it was. So its gradient is that of the arrays which it had before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from tracegrad import _jax
from tracegrad._jax.caches import of_program
from tracegrad.tape.linearised import Linearised
from tracegrad.tape.record import Record
from tracegrad.variables.leaves import leaves_of
from tracegrad.variables.nnx_objects import nnx


def before_calls(record: Record, sources: Any) -> dict[int, Any]:
    """For each array of a module that was handed on, by its identity, the one that it was before.

    `sources`: a tree, in which that of a module is told from other arrays.
    """
    if nnx() is None:
        return {}
    came_from = dict(_handed_on(record))
    if not came_from:
        return {}

    def before(slot: int) -> int:
        while slot in came_from:
            slot = came_from[slot]
        return slot

    arrays = jax.tree.leaves(sources)
    return {
        id(array): record.arrays[before(record.slots[id(array)])]
        for array, leaf in zip(arrays, leaves_of(sources), strict=True)
        if leaf.is_module_state and record.slots.get(id(array)) in came_from
    }


def _handed_on(record: Record) -> Iterator[tuple[int, int]]:
    """The slots of what functions have handed on, and of what each of these is."""
    for operation in record.operations():
        computation = operation.computation
        if isinstance(computation, Linearised):
            computation = computation.original
        for place, at in _places_of(computation).items():
            yield operation.results[place], operation.args[at]


def _places_of(call: Any) -> Mapping[int, int]:
    """Which results of an operation or equation are which of its operands, if it calls a program
    with them (loops and branches JAX itself does not let hand on what they do not change)."""
    if call.primitive not in _CALLS:
        return {}
    ((_, program),) = _jax.sub_programs(call.params)
    return _places(program)


_CALLS = frozenset({_jax.JIT, _jax.REMAT, _jax.CUSTOM_JVP, _jax.CUSTOM_VJP})


@of_program
def _places(program: Any) -> Mapping[int, int]:
    """Which results of a program are which of its operands."""
    open_form = _jax.opened(program)
    at = {variable: place for place, variable in enumerate(open_form.invars)}
    for equation in open_form.eqns:
        for place, inner in _places_of(equation).items():
            operand = equation.invars[inner]
            if not hasattr(operand, "val") and operand in at:
                at[equation.outvars[place]] = at[operand]
    return {
        place: at[atom]
        for place, atom in enumerate(open_form.outvars)
        if not hasattr(atom, "val") and atom in at
    }
