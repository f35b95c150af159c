"""JAX's original derivative functions, also with respect to some operands only.

While rules are in force, `differentiation.jax_derivatives` replaces `jax.grad` and its like in
`jax`, so that the rules apply to the functions that a user differentiates. This package uses the
originals, because the rules were applied to its programs before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import grad as grad
from jax import jacfwd as jacfwd
from jax import jacrev
from jax import jvp as jvp
from jax import linearize as linearize
from jax import value_and_grad as value_and_grad
from jax import vjp as vjp

from tracegrad._jax.arrays import is_inexact

Run = Callable[[list[Any]], Any]  # a list of operands -> a list of results


def jacobian_rows(
    run: Callable[[list[Any]], tuple[list[Any], Any]], leaves: list[Any], **options: bool
) -> tuple[list[list[Any]], Any]:
    """Returns, for each output of ``run(leaves) -> (outputs, aux)``, its derivatives with respect
    to all leaves, in reverse mode; and ``aux``.

    Like `jax.jacrev` with these options, but also for complex outputs of real leaves, for which
    `jax.jacrev` raises. As in `jax.jacfwd`, their derivative is the derivative of the real part
    plus i times the derivative of the imaginary part.
    """
    is_split: list[bool] = []

    def in_parts(leaves: list[Any]) -> tuple[list[Any], Any]:
        outputs, aux = run(leaves)
        is_split[:] = [are_real and jnp.iscomplexobj(output) for output in outputs]
        parts = [
            (output.real, output.imag) if split else (output,)
            for output, split in zip(outputs, is_split, strict=True)
        ]
        return [part for each in parts for part in each], aux

    are_real = not options.get("holomorphic") and not any(map(jnp.iscomplexobj, leaves))
    rows, aux = jacrev(in_parts, has_aux=True, **options)(leaves)
    each = iter(rows)
    return [_complex(next(each), next(each)) if split else next(each) for split in is_split], aux


def _complex(real: list[Any], imaginary: list[Any]) -> list[Any]:
    return [
        jax.lax.complex(re, im) if is_inexact(re.dtype) else re  # zeros, of an integer
        for re, im in zip(real, imaginary, strict=True)
    ]


def of_some(
    run: Run, args: Sequence[Any], positions: Sequence[int], wanted: Sequence[int] | None = None
) -> Callable[..., Any]:
    """Returns ``run(operands)`` as a function of the operands at `positions`; `args` has the other
    operands. The function returns the results at the positions `wanted`, or all results."""

    def along(*chosen: Any) -> Any:
        operands = list(args)
        for i, value in zip(positions, chosen, strict=True):
            operands[i] = value
        results = run(operands)
        return results if wanted is None else [results[j] for j in wanted]

    return along


def vjp_of_some(
    run: Run, args: Sequence[Any], positions: Sequence[int], wanted: Sequence[int] | None = None
) -> tuple[Any, Callable[[Any], Any]]:
    """Returns `jax.vjp` of ``of_some(...)`` at `args`: (results, pullback function)."""
    return vjp(of_some(run, args, positions, wanted), *(args[i] for i in positions))


def pull_back_of_some(
    run: Run,
    args: Sequence[Any],
    positions: Sequence[int],
    wanted: Sequence[int],
    cotangents: Sequence[Any],
) -> list[Any]:
    """Returns the gradients of the operands at `positions`. `cotangents`: of the results `wanted`.

    The gradients are the transpose of JAX's forward mode, as in `jax.vjp`. For a function of many
    operations, tracing takes half the time of `jax.vjp`, which first makes a program of each
    operation's derivative.
    """
    along = of_some(run, args, positions, wanted)
    primals = tuple(args[i] for i in positions)

    def tangents_of(*tangents: Any) -> Any:
        return jvp(along, primals, tangents)[1]

    return list(jax.linear_transpose(tangents_of, *primals)(list(cotangents)))
