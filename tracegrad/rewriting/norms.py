"""Norms of arrays whose squares, or the reciprocals of them, are out of a float's range."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

_FAR = 2.0**32  # brings a float of 32 bits, and one of 64, to where it has a reciprocal


def over_largest(x: Any, axis: int | None = None, xp: Any = jnp) -> tuple[Any, Any]:
    """An array divided by its largest absolute value along an axis, and that value; zeros, NaNs and
    Infs as they are. The norm is that value times the norm of the other, of which the squares are
    not lost.

    Args:
      x: floats of 32 bits at least.
      axis: it stays, of length 1; None: all.
      xp: NumPy or JAX's.
    """
    largest = xp.max(xp.abs(x), axis=axis, keepdims=True, initial=0)  # NaN if there is one
    # XLA multiplies by the reciprocal, and takes what is below the smallest normal number for zero.
    near = xp.where(largest > 1, 1 / _FAR, _FAR).astype(x.dtype)
    scale = largest * near
    usable = (scale >= xp.finfo(x.dtype).tiny) & (scale < xp.inf)
    return x * xp.where(usable, near, 1) / xp.where(usable, scale, 1), xp.where(usable, largest, 1)
