"""With respect to which arguments a gradient is planned, by their positions, as in `jax.grad`."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax

Argnums = int | Sequence[int] | None


def as_positions(argnums: Argnums) -> tuple[int, ...] | None:
    """The positions, of which there is one at least; None for all arguments.

    Raises TypeError, ValueError for what are none.
    """
    if argnums is None:
        return None
    try:
        several = argnums if isinstance(argnums, Sequence) else (argnums,)
        positions = tuple(map(operator.index, several))
    except TypeError:
        raise TypeError(f"argnums= is a position or several, as in jax.grad: {argnums!r}") from None
    if not positions:
        raise ValueError("argnums= has no position: there is no gradient to plan for")
    return positions


def differentiated(
    argnums: Argnums, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bool, ...]:
    """Of each leaf of a call's arguments whether the gradient is with respect to it; () if that is
    not said. Raises ValueError for a position that it has not."""
    positions = as_positions(argnums)
    if positions is None:
        return ()
    for position in positions:
        if not -len(args) <= position < len(args):
            raise ValueError(
                f"argnums={argnums!r} was given to plan_recompute, but the function was called "
                f"with {len(args)} positional arguments"
            )
    chosen = {position % len(args) for position in positions}
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    by_leaf = [i in chosen for i, count in enumerate(counts) for _ in range(count)]
    return (*by_leaf, *[False] * len(jax.tree.leaves(kwargs)))
