"""Makes a function that JAX can differentiate from saved programs.

Each program becomes a `jax.custom_vjp` whose backward pass calls the program's gradient programs,
which can be differentiated in the same way. The derivative of the programs of the highest order is
an error that names the `gradient_order` to save with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tracegrad import _jax
from tracegrad.saving.manifest import FunctionRecord, Gradient, Program

Flat = Callable[..., list[Any]]


def differentiable(
    program: Program,
    exported: Mapping[str, Any],
    record: FunctionRecord,
    not_saved: Callable[[int], Exception],
    order: int = 0,
) -> Flat:
    """Returns the function of flat arrays that a program computes.

    The function can be compiled, batched (one element after the other), and differentiated until
    there are no more gradient programs.

    Args:
      exported: the `jax.export.Exported` of each program, by the names of their arrays.
      not_saved: makes the error for a derivative of an order that was not saved.
      order: the order of the derivative that `program` computes; 0 for the function itself.
    """

    def below(program: Program) -> Flat:
        return differentiable(program, exported, record, not_saved, order + 1)

    # `jax.export` has no rule for `jax.vmap`: the program runs for one element after the other.
    one_by_one: Any = jax.custom_batching.sequential_vmap
    run = one_by_one(_flatten_call(exported[program.array]))
    value = None if program.value is None else below(program.value)
    gradients = {
        gradient.results: (gradient, below(gradient.program)) for gradient in program.gradients
    }

    def compute(*inputs: Any) -> list[Any]:
        return _jax.varying_alike(run(*inputs), inputs)

    compute.__name__ = record.name  # the name of the rule in messages about its gradient
    call = jax.custom_vjp(compute)

    # With `symbolic_zeros`, JAX tells the rule which results have cotangents.
    def forward(*marked: Any) -> tuple[list[Any], list[Any]]:
        inputs = [each.value for each in marked]
        return (call if value is None else value)(*inputs), inputs

    def backward(inputs: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        chosen = [j for j, ct in enumerate(cotangents) if not isinstance(ct, SymbolicZero)]
        if chosen and order == record.gradient_order:
            raise not_saved(order + 1)
        found: list[Any] = [None] * len(inputs)
        for results in _choose_gradient_programs(program, chosen):
            gradient, pull_back = gradients[results]
            given = [_instantiate_zeros(cotangents[j]) for j in results]
            connected = _find_connected_operands(program, chosen, gradient)
            for i, part in zip(gradient.operands, pull_back(*inputs, *given), strict=True):
                if i in connected:
                    found[i] = part if found[i] is None else found[i] + part
        return tuple(found)

    call.defvjp(forward, backward, symbolic_zeros=True)

    # Inside of `jax.shard_map`, JAX requires a gradient to vary over the same axes as its operand.
    # A gradient program's results vary over the axes of all operands, so each operand has to.
    def alike(*inputs: Any) -> list[Any]:
        return call(*_jax.varying_alike(inputs))

    return alike


def _flatten_call(exported: Any) -> Flat:
    def run(*inputs: Any) -> list[Any]:
        args, _ = jax.tree.unflatten(exported.in_tree, inputs)
        return jax.tree.leaves(exported.call(*args))

    return run


def _instantiate_zeros(cotangent: Any) -> Any:
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _choose_gradient_programs(program: Program, chosen: Sequence[int]) -> list[tuple[int, ...]]:
    """Each single result has a program, and all results together have one. For some of the results,
    single programs are added, if gradients may be added. Otherwise the program for all results runs
    with zeros for the other results, and so also calls the custom gradients of the other
    results."""
    every = max((gradient.results for gradient in program.gradients), key=len, default=())
    wanted = tuple(j for j in chosen if j in every)
    singles = [gradient.results for gradient in program.gradients if len(gradient.results) == 1]
    if not wanted:
        return []
    if wanted == every or (wanted[0],) not in singles or not (len(wanted) == 1 or program.may_add):
        return [every]
    return [(j,) for j in wanted]


def _find_connected_operands(program: Program, chosen: Sequence[int], called: Gradient) -> set[int]:
    """Returns the operands that some result in `chosen` depends on. Unknown without single
    programs: all."""
    single = [
        gradient.operands
        for gradient in program.gradients
        if len(gradient.results) == 1 and gradient.results[0] in chosen
    ]
    return set(called.operands).intersection(*([set().union(*single)] if single else []))
