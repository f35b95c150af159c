"""Decides by type which leaves have a gradient, and makes zeros for the other leaves."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.variables.nnx_objects import refuse_hijax


def zeros_for(leaf: Any) -> Any:
    """An array of numbers or booleans gets zeros of its shape and dtype, a Python number the zero
    of its type, and any other leaf (a function, a string, a random key) None."""
    if isinstance(leaf, (bool, int, float, complex)):
        return type(leaf)(0)
    return None if not is_numeric(leaf) else jnp.zeros_like(leaf)


def none_for(leaf: Any) -> None:
    """None tells "no gradient" from zero."""


def zero_block(shape: tuple[int, ...], leaf: Any) -> Any:
    """The zero Jacobian of an output of shape `shape` with respect to a leaf: None if `zeros_for`
    of the leaf is None; for a scalar output and a Python number, the zero of the number's type."""
    zeros = zeros_for(leaf)
    if zeros is None or (shape == () and not isinstance(zeros, jax.Array)):
        return zeros
    return jnp.zeros((*shape, *jnp.shape(zeros)), jnp.result_type(zeros))


def as_inexact(given: Any, dtype: Any) -> Any:
    """Converts a Python number or NumPy integers to `dtype`, if it is a float or complex dtype, and
    for a complex number only if it is complex. Returns other values unchanged."""
    is_number = isinstance(given, int | float | complex | np.integer)
    is_integers = isinstance(given, np.ndarray) and given.dtype.kind in "iu"
    required = np.complexfloating if isinstance(given, complex) else np.inexact
    is_converted = (is_number or is_integers) and jnp.issubdtype(dtype, required)
    return jnp.asarray(given, dtype) if is_converted else given


# The kind of a leaf decides its gradient:
#   "inexact": a float or complex array or number. The gradient is an array like the leaf.
#   "exact": integers or booleans. The gradient is zeros, if requested.
#   "key": random keys. The gradient is zeros, if requested.
#   "setting": a number that configures an equinox module. There is no gradient.
#   "other": anything else. There is no gradient.
Kind = Literal["inexact", "exact", "key", "setting", "other"]


def kind_of(leaf: Any) -> Kind:
    """Never "setting": only the tree around a leaf can tell a setting."""
    aval = type_of(leaf)
    if not isinstance(aval, _jax.ARRAY):
        return "other"
    if _jax.is_inexact(aval.dtype):
        return "inexact"
    return "key" if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else "exact"


def is_numeric(leaf: Any) -> bool:
    """For numbers, booleans, and arrays of these."""
    return kind_of(leaf) in ("inexact", "exact")


def type_of(leaf: Any) -> Any:
    """Refuses hijax objects; returns None for a leaf without a JAX type."""
    refuse_hijax(leaf)
    return _jax.type_of(leaf)
