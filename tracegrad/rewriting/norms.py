"""Norms and clipping of arrays whose squares or reciprocals would overflow or underflow."""

from __future__ import annotations

import functools
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
    near = _near_one(largest, xp)
    scale = largest * near
    usable = (scale >= xp.finfo(x.dtype).tiny) & (scale < xp.inf)
    return x * xp.where(usable, near, 1) / xp.where(usable, scale, 1), xp.where(usable, largest, 1)


def _near_one(x: Any, xp: Any) -> Any:
    """Returns factors for absolute values, so that the reciprocal of the product is a normal
    number. XLA divides by multiplying with the reciprocal, and treats subnormal numbers as zero."""
    return xp.where(x > 1, 1 / _FAR, _FAR).astype(x.dtype)


# --------------------------------------------------------------------------------- limits on norms


def within_value(x: Any, limit: float) -> Any:
    """Limits the absolute value of each entry, real or complex."""
    if limit == jnp.inf:
        return x
    limit = _cap_limit(limit, x.dtype)
    if not jnp.iscomplexobj(x):
        bound = jnp.asarray(limit, x.dtype)
        # `jnp.clip` halves the derivative at entries that are equal to the limit.
        return jnp.where(x > bound, bound, jnp.where(x < -bound, -bound, x))
    return _limit_norm(x, limit, axis=0)


def within_norm(x: Any, limit: float) -> Any:
    if limit == jnp.inf:
        return x
    return _limit_norm(x, _cap_limit(limit, x.dtype), axis=None)


def _cap_limit(limit: float, dtype: Any) -> float:
    """Caps a finite limit at the type's largest number, so that infinite entries become finite."""
    return min(float(limit), float(_finfo(dtype).max))


def _to_real_parts(x: Any) -> Any:
    """Returns real and, if complex, imaginary parts along a new first axis, as float32 or wider."""
    if jnp.iscomplexobj(x):
        return jnp.stack([jnp.real(x), jnp.imag(x)])
    return at_least_32_bits(x)[None]


def _from_real_parts(parts: Any, dtype: Any) -> Any:
    return jax.lax.complex(*parts) if len(parts) == 2 else parts[0].astype(dtype)


def at_least_32_bits(x: Any) -> Any:
    return x.astype(jnp.float32) if _finfo(x.dtype).bits < 32 else x


@functools.partial(jax.jit, static_argnames="axis")  # traced and lowered once for all matches
def _limit_norm(given: Any, limit: float, axis: int | None) -> Any:
    """Limits the Euclidean norm of the `_to_real_parts` of an array along an axis.

    Next to an infinite entry, finite entries count as 0. An array with a NaN stays as it is.
    """
    x = _to_real_parts(given)
    infinite = jnp.isinf(x)
    has_infinite = jnp.any(infinite, axis, keepdims=True)
    has_infinite &= ~jnp.any(jnp.isnan(x), axis, keepdims=True)
    x = jnp.where(has_infinite, jnp.where(infinite, jnp.sign(x), 0), x)
    x, largest = over_largest(x, axis)
    squares = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
    norm = jnp.sqrt(jnp.where(squares > 0, squares, 1))  # no NaN in derivatives at zero
    exceeds = has_infinite | ((squares > 0) & (largest > limit / norm))
    limited = _from_real_parts(limit * (x / norm), given.dtype)
    return jnp.where(jnp.squeeze(exceeds, axis), limited, given)
