"""What is differentiated: a function of some of its operands, which gives some of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tracegrad import _jax

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
    return _jax.vjp(of_some(run, args, positions, wanted), *(args[i] for i in positions))
