"""Norms, and limits on them, of arrays whose squares or reciprocals are out of a float's range."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_FAR = 2.0**32  # brings a float of 32 bits, and one of 64, to where it has a reciprocal
_finfo: Any = jnp.finfo  # has no types


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


# ---------------------------------------------------------------------------------- limits on them


def within_value(x: Any, limit: float) -> Any:
    """Clips each entry; a complex one by its absolute value."""
    if limit == jnp.inf:
        return x
    limit = _reachable(limit, x.dtype)
    if not jnp.iscomplexobj(x):
        bound = jnp.asarray(limit, x.dtype)
        # `jnp.clip` halves the derivative of what stands at the limit exactly.
        return jnp.where(x > bound, bound, jnp.where(x < -bound, -bound, x))
    is_over, direction = _over(_parts(x), limit, axis=0)
    return jnp.where(is_over, _of_parts(limit * direction, x.dtype), x)


def within_norm(x: Any, limit: float) -> Any:
    """Scales an array down to a Euclidean norm."""
    if limit == jnp.inf:
        return x
    limit = _reachable(limit, x.dtype)
    is_over, direction = _over(_parts(x), limit, axis=None)
    return jnp.where(is_over, _of_parts(limit * direction, x.dtype), x)


def _reachable(limit: float, dtype: Any) -> float:
    """A limit that the type can hold, so that infinite entries do not stay it."""
    return min(float(limit), float(_finfo(dtype).max))


def _parts(x: Any) -> Any:
    """An array as reals of 32 bits at least: one part, or the real and the imaginary one."""
    if jnp.iscomplexobj(x):
        return jnp.stack([jnp.real(x), jnp.imag(x)])
    return at_least_32_bits(x)[None]


def _of_parts(parts: Any, dtype: Any) -> Any:
    return jax.lax.complex(*parts) if len(parts) == 2 else parts[0].astype(dtype)


def at_least_32_bits(x: Any) -> Any:
    """Half precision and less as float32: in that, their squares and products are numbers still."""
    return x.astype(jnp.float32) if _finfo(x.dtype).bits < 32 else x


def _over(x: Any, limit: float, axis: int | None) -> tuple[Any, Any]:
    """Whether the Euclidean norm along an axis is above a limit, and if so the unit vector."""
    infinite = jnp.isinf(x)
    has_infinite = jnp.any(infinite, axis, keepdims=True)
    has_infinite &= ~jnp.any(jnp.isnan(x), axis, keepdims=True)
    x = jnp.where(has_infinite, jnp.where(infinite, jnp.sign(x), 0), x)
    x, largest = over_largest(x, axis)
    squares = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
    norm = jnp.sqrt(jnp.where(squares > 0, squares, 1))  # no NaN in derivatives at zero
    is_over = has_infinite | ((squares > 0) & (largest > limit / norm))
    return jnp.squeeze(is_over, axis), x / norm
