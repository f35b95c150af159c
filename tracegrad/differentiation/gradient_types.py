"""Decides by its type which gradient a leaf has, and makes zeros of a leaf's type."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.tracing.nnx_objects import refuse_hijax


def zeros_for(leaf: Any) -> Any:
    """Returns zeros of the shape and dtype of a numeric array, the zero of a Python number's type,
    and None for other leaves (a function, a string, a random key)."""
    if isinstance(leaf, (bool, int, float, complex)):
        return type(leaf)(0)
    return None if not is_numeric(leaf) else jnp.zeros_like(leaf)


def none_for(leaf: Any) -> None:
    """Returns None, which says that there is no gradient, for users who tell it from zero."""


def zero_block(shape: tuple[int, ...], leaf: Any) -> Any:
    """Returns the zero Jacobian of an output of shape `shape` with respect to a leaf: None if
    `zeros_for` returns None; a Python zero for a scalar output and a Python number."""
    zeros = zeros_for(leaf)
    if zeros is None or (shape == () and not isinstance(zeros, jax.Array)):
        return zeros
    return jnp.zeros((*shape, *jnp.shape(zeros)), jnp.result_type(zeros))


def as_inexact(value: Any, dtype: Any) -> Any:
    """Converts a Python number or a NumPy array of integers to a float or complex `dtype`, and a
    complex number only to a complex `dtype`. Returns other values unchanged."""
    is_number = isinstance(value, int | float | complex | np.integer)
    is_integer_array = isinstance(value, np.ndarray) and value.dtype.kind in "iu"
    required = np.complexfloating if isinstance(value, complex) else np.inexact
    fits = (is_number or is_integer_array) and jnp.issubdtype(dtype, required)
    return jnp.asarray(value, dtype) if fits else value


# The kind of a leaf decides its gradient:
#   "inexact": a float or complex array or number. The gradient is an array like the leaf.
#   "exact": integers or booleans. The gradient is zeros, if requested; float0 with `allow_int`.
#   "key": random keys. There is no gradient; float0 with `allow_int`.
#   "setting": a number that configures an equinox module. There is no gradient.
#   "other": anything else. There is no gradient.
Kind = Literal["inexact", "exact", "key", "setting", "other"]


def kind_of(leaf: Any) -> Kind:
    """Never returns "setting": a setting shows only in the tree around the leaf."""
    aval = type_of(leaf)
    if not isinstance(aval, _jax.ARRAY):
        return "other"
    if _jax.is_inexact(aval.dtype):
        return "inexact"
    return "key" if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else "exact"


def is_numeric(leaf: Any) -> bool:
    """Whether a leaf is a number, a boolean, or an array of these."""
    return kind_of(leaf) in ("inexact", "exact")


def type_of(leaf: Any) -> Any:
    """Returns None for a leaf without a JAX type. Raises TypeError for a hijax object."""
    refuse_hijax(leaf)
    return _jax.type_of(leaf)
