"""Saved programs → a function that JAX differentiates by them.

Each program becomes a `jax.custom_vjp` whose gradient is the next program, and so on to the last,
whose own derivative is an error that says what to save with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tracegrad import _jax
from tracegrad.saving.program_tree import ProgramTree, gets_gradient, has_cotangent, has_flags
from tracegrad.variables.statics import Static

Flat = Callable[..., list[Any]]

# Into how many calls of the same gradient program its results may be split, so that it shows on
# which cotangents each depends. Compiled, XLA merges what they have in common.
_MOST_CALLS = 4


def differentiable(
    step: ProgramTree[Any], assigned: int, beyond: Callable[[int], Exception], order: int = 0
) -> Flat:
    """The function of flat arrays that a program computes.

    Args:
      step: the program, as a `jax.export.Exported`, and those by which it is differentiated.
      assigned: how many of its last results are new values of Variables.
      beyond: makes the error for a derivative of an order that was not saved.
      order: how many derivatives are behind it.

    It can be differentiated as often as there are further programs, batched (one element after
    the other), and compiled.
    """
    run = _one_by_one(step.program.call)
    flowing = has_cotangent(step.program.out_avals, assigned)
    active = gets_gradient(step.program.in_avals, step.refused)
    groups = _groups({i: {j for j in flowing if i in step.connected[j]} for i in active})
    gradient = value = None
    is_flagged = False
    if step.gradient is not None:
        gradient = differentiable(step.gradient, 0, beyond, order + 1)
        operands = step.program.in_avals, step.gradient.program.in_avals
        is_flagged = has_flags(*operands, len(flowing))
    if step.value is not None:
        value = differentiable(step.value, assigned, beyond, order + 1)

    @jax.custom_vjp
    def call(*inputs: Any) -> list[Any]:
        return _jax.varying_alike(run(*inputs), inputs)

    # What is told about symbolic zeros learns what is being differentiated, and which results have
    # cotangents.
    def forward(*marked: Any) -> tuple[list[Any], Any]:
        reason = next((why for i, why in step.refused if marked[i].perturbed), None)
        inputs = [each.value for each in marked]
        return (call if value is None else value)(*inputs), (inputs, Static(reason))

    def backward(residuals: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        inputs, reason = residuals  # what is static comes back as it is
        if reason and not all(isinstance(ct, SymbolicZero) for ct in cotangents):
            raise ValueError(reason)
        gradients: list[Any] = [None] * len(inputs)
        for operands, results in groups:
            if all(isinstance(cotangents[j], SymbolicZero) for j in results):
                continue
            if gradient is None:
                raise beyond(order + 1)
            # The cotangents of other results would make it seem that these depend on them.
            has_one = [
                j in results and not isinstance(cotangents[j], SymbolicZero) for j in flowing
            ]
            given = [
                cotangents[j] if flag else _zeros(cotangents[j])
                for j, flag in zip(flowing, has_one, strict=True)
            ]
            flags = list(map(jnp.asarray, has_one)) if is_flagged else []
            found = dict(zip(active, gradient(*inputs, *given, *flags), strict=True))
            for i in operands:
                gradients[i] = found[i]
        return tuple(gradients)

    call.defvjp(forward, backward, symbolic_zeros=True)

    # JAX wants a gradient to vary over the axes of a `jax.shard_map` as its operand does. It varies
    # as all operands together do, and so must these.
    def alike(*inputs: Any) -> list[Any]:
        return call(*_jax.varying_alike(inputs))

    return alike


def _zeros(cotangent: Any) -> Any:
    return jnp.zeros(cotangent.shape, cotangent.dtype)


def _groups(sources: dict[int, set[int]]) -> list[tuple[list[int], set[int]]]:
    """The operands that get a gradient, those together that get it from the same results."""
    groups: dict[frozenset[int], list[int]] = {}
    for i, results in sources.items():
        if results:
            groups.setdefault(frozenset(results), []).append(i)
    if len(groups) > _MOST_CALLS:
        return [([i for some in groups.values() for i in some], set().union(*groups))]
    return [(operands, set(results)) for results, operands in groups.items()]


def _one_by_one(fun: Flat) -> Flat:
    """The function, which under `jax.vmap` is called for one element after the other: there is
    no rule by which a program that was compiled for one size could be batched."""

    @jax.custom_batching.custom_vmap
    def run(*inputs: Any) -> list[Any]:
        return list(fun(*inputs))

    def batched(size: int, is_batched: Sequence[bool], *inputs: Any) -> Any:
        def one(elements: Sequence[Any]) -> list[Any]:
            rest = iter(elements)
            return list(
                run(*(next(rest) if b else x for x, b in zip(inputs, is_batched, strict=True)))
            )

        outs = jax.lax.map(one, [x for x, b in zip(inputs, is_batched, strict=True) if b])
        return outs, [True] * len(outs)

    run.def_vmap(batched)
    return run
