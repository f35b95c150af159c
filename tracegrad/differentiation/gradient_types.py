"""Which leaves have a gradient, by their types, and what zeros stand for those that have none."""

from __future__ import annotations

from typing import Any, Literal

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


def no_gradient(leaf: Any) -> None:
    """What stands for a leaf that was not selected, for who tells "no gradient" from zero."""


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


# What a gradient by a leaf is: of a float or complex array, or such a number, an array like it; of
# integers and booleans ("exact") and of random keys ("key") zeros, if anybody wants those; of a
# number that is part of what an equinox module computes ("setting"), and of all else, none.
Kind = Literal["inexact", "exact", "key", "setting", "other"]


def kind_of(leaf: Any) -> Kind:
    """What a gradient by a leaf is, whatever holds the leaf: never "setting"."""
    aval = type_of(leaf)
    if not isinstance(aval, _jax.ARRAY):
        return "other"
    if _jax.is_inexact(aval.dtype):
        return "inexact"
    return "key" if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else "exact"


def is_numeric(leaf: Any) -> bool:
    """Whether a leaf is an array of numbers or booleans, or such a number."""
    return kind_of(leaf) in ("inexact", "exact")


def type_of(leaf: Any) -> Any:
    """The JAX type of a leaf; None if it has none."""
    refuse_hijax(leaf)
    return _jax.type_of(leaf)
