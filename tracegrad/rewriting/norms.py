"""Norms and clipping of arrays whose squares or reciprocals would overflow or underflow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_FAR = 2.0**32  # factor that makes the reciprocal of a float32 or normal float64 a normal number
_finfo: Any = jnp.finfo  # JAX has no type annotations for it


def over_largest(x: Any, axis: int | None = None, xp: Any = jnp) -> tuple[Any, Any]:
    """Returns an array divided by its largest absolute value along an axis, and that value.

    Where the value is 0, NaN or Inf (or too small to divide by), returns the array unchanged, and
    1. The norm of `x` is the second result times the norm of the first result, in which the sum of
    squares neither overflows nor underflows.

    Args:
      x: floats of 32 bits at least.
      axis: has length 1 in the second result; None: all axes.
      xp: `numpy` or `jax.numpy`.
    """
    largest = xp.max(xp.abs(x), axis=axis, keepdims=True, initial=0)  # NaN if there is one
    near = near_one(largest, xp)
    scale = largest * near
    usable = (scale >= xp.finfo(x.dtype).tiny) & (scale < xp.inf)
    return x * xp.where(usable, near, 1) / xp.where(usable, scale, 1), xp.where(usable, largest, 1)


def near_one(x: Any, xp: Any = jnp) -> Any:
    """Returns factors for absolute values, so that the reciprocal of the product is a normal
    number. XLA divides by multiplying with the reciprocal, and treats subnormal numbers as zero."""
    return xp.where(x > 1, 1 / _FAR, _FAR).astype(x.dtype)


# --------------------------------------------------------------------------------- limits on norms


def within_value(x: Any, limit: float) -> Any:
    """Limits the absolute value of each entry, real or complex."""
    limit = min(limit, float(_finfo(x.dtype).max))  # 0 * inf would be NaN in derivatives
    if not jnp.iscomplexobj(x):
        bound = jnp.asarray(limit, x.dtype)
        # `jnp.clip` halves the derivative at entries that are equal to the limit.
        return jnp.where(x > bound, bound, jnp.where(x < -bound, -bound, x))
    size = jnp.abs(x)
    exceeds = size > limit
    return jnp.where(exceeds, limit * (x / jnp.where(exceeds, size, 1)), x)


@jax.jit  # traced and lowered once for all matches
def within_norm(x: Any, limit: float) -> Any:
    """Limits the Euclidean norm of an array. An array with a NaN stays as it is."""
    scaled, largest = over_largest(at_least_32_bits(x))
    bound = jnp.minimum(limit, _finfo(scaled.dtype).max)  # 0 * inf would be NaN in derivatives
    squares = jnp.sum(jnp.real(scaled * jnp.conj(scaled)))
    norm = jnp.sqrt(jnp.where(squares > 0, squares, 1))  # no NaN in derivatives at zero
    exceeds = (squares > 0) & (largest > bound / norm)
    return jnp.where(exceeds, (bound * (scaled / norm)).astype(x.dtype), x)


def at_least_32_bits(x: Any) -> Any:
    return x.astype(jnp.float32) if _finfo(x.dtype).bits < 32 else x
