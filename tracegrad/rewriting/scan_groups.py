"""A scan in groups of iterations, of which only the first carry is kept.

Each group is run again when its turn comes in the backward pass: Griewank's checkpointing at two
levels, for which the square root of the length is best.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from tracegrad import _jax
from tracegrad.ir import Node
from tracegrad.tracing import to_callable


def group_size(length: int) -> int:
    """The divisor of a length that is nearest to its square root, in proportion; 1 for a prime."""
    divisors = [d for d in range(2, length) if length % d == 0]
    return min(divisors, key=lambda d: (d + length // d, d), default=1)


def in_groups(node: Node, size: int) -> Callable[..., list[Any]]:
    """The same scan in groups of so many iterations, of which only the first carry is kept."""
    params, body = node.params, to_callable(node.regions["jaxpr"])
    constants, carried = _jax.scan_split(params)
    groups = params["length"] // size

    def run(*operands: Any) -> list[Any]:
        fixed = operands[:constants]
        carry = list(operands[constants : constants + carried])
        scanned = list(operands[constants + carried :])

        def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            results = body(*fixed, *carry, *slices)
            return results[:carried], results[carried:]

        def group(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            how = {"reverse": params["reverse"], "unroll": params["unroll"]}
            return lax.scan(step, carry, slices, length=size, **how)

        final, stacked = lax.scan(
            jax.checkpoint(group),
            carry,
            [x.reshape(groups, size, *x.shape[1:]) for x in scanned],
            length=groups,
            reverse=params["reverse"],
        )
        return [*final, *(y.reshape(groups * size, *y.shape[2:]) for y in stacked)]

    run.__name__ = run.__qualname__ = "scan"
    return run
