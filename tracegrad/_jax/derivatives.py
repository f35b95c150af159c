"""JAX's own derivatives, whatever stands in their place in `jax` while rules are in force, also
with respect to some operands only.

See `differentiation.jax_derivatives`: what a user differentiates goes by the rules, and what this
package differentiates was edited before.
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
    """The derivatives by all leaves of each output of ``run(leaves) -> (outputs, aux)``, in reverse
    mode; and ``aux``.

    As `jax.jacrev` with these options, and of complex outputs of real leaves too, where that
    raises: as `jax.jacfwd` has it, the derivatives of the real part plus i times those of the
    imaginary part.
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
    """``run(operands)`` as a function of the operands at some positions, to be differentiated with
    respect to these; the others are those of `args`. It gives the results at the positions
    `wanted`, or all."""

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
    """`jax.vjp` of that at `args`: the results, and what pulls back their cotangents."""
    return vjp(of_some(run, args, positions, wanted), *(args[i] for i in positions))


def pull_back_of_some(
    run: Run,
    args: Sequence[Any],
    positions: Sequence[int],
    wanted: Sequence[int],
    cotangents: Sequence[Any],
) -> list[Any]:
    """The gradients of the operands at some positions, from the cotangents of the results `wanted`.

    The transpose of JAX's forward mode, which is what `jax.vjp` gives as well. To trace a function
    of many operations this takes half of the time of `jax.vjp`, which makes a program of its own of
    each operation's derivative first.
    """
    along = of_some(run, args, positions, wanted)
    primals = tuple(args[i] for i in positions)

    def tangents_of(*tangents: Any) -> Any:
        return jvp(along, primals, tangents)[1]

    return list(jax.linear_transpose(tangents_of, *primals)(list(cotangents)))
