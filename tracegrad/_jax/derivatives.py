"""JAX's own derivatives, whatever stands in their place in `jax` while rules are in force, also
with respect to some operands only.

See `differentiation.jax_derivatives`: what a user differentiates goes by the rules, and what this
package differentiates was edited before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import grad as grad
from jax import jacfwd as jacfwd
from jax import jacrev as jacrev
from jax import jvp as jvp
from jax import linearize as linearize
from jax import value_and_grad as value_and_grad
from jax import vjp as vjp

Run = Callable[[list[Any]], Any]  # a list of operands -> a list of results


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
