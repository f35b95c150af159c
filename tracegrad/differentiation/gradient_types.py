"""Which leaves have a gradient, by their types, and what zeros stand for those that have none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.variables.nnx_objects import refuse_hijax


def zeros_for(leaf: Any) -> Any:
    """The gradient of a leaf that was not selected.

    Zeros of its shape and dtype for an array of numbers or booleans, the zero of its own type for
    a Python number, None for anything else (functions, strings, random keys; and for the numbers
    of an `equinox.Module`, as it has it).
    """
    if isinstance(leaf, (bool, int, float, complex)):
        return type(leaf)(0)
    return None if not is_numeric(leaf) else jnp.zeros_like(leaf)


def zero_block(shape: tuple[int, ...], leaf: Any) -> Any:
    """The derivative of an output of this shape by a leaf that was not selected; see `grad`."""
    zeros = zeros_for(leaf)
    if zeros is None or (shape == () and not isinstance(zeros, jax.Array)):
        return zeros
    return jnp.zeros((*shape, *jnp.shape(zeros)), jnp.result_type(zeros))


def as_inexact(given: Any, dtype: Any) -> Any:
    """A cotangent or tangent as it was given; of numbers an array of the dtype that it is to have.

    A Python number, which has no dtype of its own, and integers of NumPy take it, if it is one of
    floats, or of complex numbers.
    """
    is_number = isinstance(given, int | float | complex | np.integer)
    is_integers = isinstance(given, np.ndarray) and given.dtype.kind in "iu"
    kinds = np.complexfloating if isinstance(given, complex) else np.inexact
    takes_it = (is_number or is_integers) and jnp.issubdtype(dtype, kinds)
    return jnp.asarray(given, dtype) if takes_it else given


def is_numeric(leaf: Any) -> bool:
    """Whether a leaf is an array of numbers or booleans, or such a number."""
    aval = type_of(leaf)
    return isinstance(aval, jax.core.ShapedArray) and not jnp.issubdtype(
        aval.dtype, jax.dtypes.extended
    )


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, of random keys too, or a number."""
    return isinstance(type_of(leaf), _jax.ARRAY)


def is_differentiable(leaf: Any) -> bool:
    """Whether a leaf is a float or complex array, or such a number."""
    aval = type_of(leaf)
    return isinstance(aval, _jax.ARRAY) and _jax.is_inexact(aval.dtype)


def type_of(leaf: Any) -> Any:
    """The JAX type of a leaf; None if it has none."""
    refuse_hijax(leaf)
    return _jax.type_of(leaf)
