"""Saved programs → a function that JAX differentiates by them.

Each program becomes a `jax.custom_vjp` whose gradient is that of the next programs, and so on to
the last, whose own derivative is an error that says what to save with.
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
from tracegrad.variables.statics import Static

Flat = Callable[..., list[Any]]


def differentiable(
    program: Program,
    exported: Mapping[str, Any],
    record: FunctionRecord,
    beyond: Callable[[int], Exception],
    behind: int = 0,
) -> Flat:
    """The function of flat arrays that a program computes.

    Args:
      program: the program, and those by which it is differentiated.
      exported: the `jax.export.Exported` of each, by the names of their arrays.
      record: says what the function is called, and how many derivatives were saved.
      beyond: makes the error for a derivative of an order that was not saved.
      behind: how many derivatives are behind this one.

    It can be differentiated as often as there are further programs, batched (one element after
    the other), and compiled.
    """

    def below(program: Program) -> Flat:
        return differentiable(program, exported, record, beyond, behind + 1)

    # `jax.export` has no rule for `jax.vmap`: the program runs for one element after the other.
    one_by_one: Any = jax.custom_batching.sequential_vmap
    run = one_by_one(_flat(exported[program.array]))
    value = None if program.value is None else below(program.value)
    gradients = {
        gradient.results: (gradient, below(gradient.program)) for gradient in program.gradients
    }

    def compute(*inputs: Any) -> list[Any]:
        return _jax.varying_alike(run(*inputs), inputs)

    compute.__name__ = record.name  # whoever looks for wrong rules names this one by it
    call = jax.custom_vjp(compute)

    # What is told about symbolic zeros learns what is being differentiated, and which results have
    # cotangents.
    def forward(*marked: Any) -> tuple[list[Any], Any]:
        reason = next((why for i, why in program.refused if marked[i].perturbed), None)
        inputs = [each.value for each in marked]
        return (call if value is None else value)(*inputs), (inputs, Static(reason))

    def backward(residuals: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        inputs, reason = residuals  # what is static comes back as it is
        chosen = [j for j, ct in enumerate(cotangents) if not isinstance(ct, SymbolicZero)]
        if chosen and reason:
            raise ValueError(reason)
        if chosen and behind == record.gradient_order:
            raise beyond(behind + 1)
        found: list[Any] = [None] * len(inputs)
        for results in _parts(program, chosen):
            gradient, pull_back = gradients[results]
            given = [_dense(cotangents[j]) for j in results]
            connected = _connected(program, chosen, gradient)
            for i, part in zip(gradient.operands, pull_back(*inputs, *given), strict=True):
                if i in connected:
                    found[i] = part if found[i] is None else found[i] + part
        return tuple(found)

    call.defvjp(forward, backward, symbolic_zeros=True)

    # JAX wants a gradient to vary over the axes of a `jax.shard_map` as its operand does. It varies
    # as all operands together do, and so must these.
    def alike(*inputs: Any) -> list[Any]:
        return call(*_jax.varying_alike(inputs))

    return alike


def _flat(exported: Any) -> Flat:
    def run(*inputs: Any) -> list[Any]:
        args, _ = jax.tree.unflatten(exported.in_tree, inputs)
        return jax.tree.leaves(exported.call(*args))

    return run


def _dense(cotangent: Any) -> Any:
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _parts(program: Program, chosen: Sequence[int]) -> list[tuple[int, ...]]:
    """The results of each gradient program that is called where `chosen` have cotangents.

    One result alone has its own program, all of them one together. Some of many are the sum of
    single ones where gradients may be added. Else the program for all gets zeros for the rest: the
    rules on the way to those are asked too.
    """
    every = max((gradient.results for gradient in program.gradients), key=len, default=())
    wanted = tuple(j for j in chosen if j in every)
    singles = [gradient.results for gradient in program.gradients if len(gradient.results) == 1]
    if not wanted:
        return []
    if wanted == every or (wanted[0],) not in singles or not (len(wanted) == 1 or program.may_add):
        return [every]
    return [(j,) for j in wanted]


def _connected(program: Program, chosen: Sequence[int], called: Gradient) -> set[int]:
    """The operands that get a gradient from a program: those that some of `chosen` depend on. Where
    there is one program for all results, that is not known, and they get zeros."""
    single = [
        gradient.operands
        for gradient in program.gradients
        if len(gradient.results) == 1 and gradient.results[0] in chosen
    ]
    return set(called.operands).intersection(*([set().union(*single)] if single else []))
