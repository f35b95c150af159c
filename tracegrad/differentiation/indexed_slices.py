"""`IndexedSlices`: the gradient of a table whose rows a program looked up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.row_ids import are_filled, are_opaque, integers, opaque

LARGE = 100_000_000  # elements from which on `to_dense` warns, as in TensorFlow


class IndexedSlices:
    """Some rows of an array whose other rows are zero: one slice for each lookup.

    The slices stand for a dense array: zeros, plus ``values[i]`` at row ``indices[i]``. If an index
    occurs several times, its slices are added up. An index that is not a row counts for nothing
    (the gradient of a lookup out of range has the index ``dense_shape[0]``). The gradient functions
    return slices for ``sparse=True``; the memory of slices is proportional to the number of
    lookups, not to the size of the table.

    ``table - 0.1 * slices`` is a step of gradient descent that changes the looked-up rows only (in
    place if `table` is donated); for optimisers with a state see `apply_rows`.

    `IndexedSlices` are a pytree, so they go through `jax.jit`, loops and meshes. But the leaves
    alone are not a gradient: a function that computes with the leaves (``jax.tree.map``, an
    optimiser, a norm) would treat several slices of one row as several rows. So the row ids have a
    type that can be moved but not computed with, and JAX raises an error instead of returning a
    wrong number. (If JAX fills the leaves with a number, as `jax.numpy.ones_like` does, the dense
    array has NaN.) Before you map over a tree, convert the slices to arrays, or treat the slices as
    one leaf by ``is_leaf`` (see below). For a norm, use ``slices.deduplicated().values``.

    Args:
      values: ``[n, ...]``, of any dtype.
      indices: ``int[n]``; integers of a smaller type become ``int32``.
      dense_shape: the shape ``[rows, ...]`` of the dense array; None if unknown. A traced array
        counts as None. Slices that a rule returns as the gradient of an input, or that are passed
        as the gradient of a target, get the shape of the input or target.

    Raises:
      ValueError: the shapes do not fit each other.
      TypeError: `indices` are not integers.

    The model is ``tf.IndexedSlices``.

    >>> import jax.numpy as jnp
    >>> slices = IndexedSlices(jnp.ones((3, 2)), jnp.array([0, 2, 0]), dense_shape=(4, 2))
    >>> slices
    IndexedSlices(values=f32[3,2], indices=i32[3], dense_shape=(4, 2))
    >>> print((2 * slices).to_dense())
    [[4. 4.]
     [0. 0.]
     [2. 2.]
     [0. 0.]]

    Make dense gradients for code that takes arrays only, and updates for ``optax.apply_updates``:

    >>> import jax
    >>> gradients = {"table": slices, "bias": jnp.ones(2)}
    >>> def is_slices(g):
    ...     return isinstance(g, IndexedSlices)
    >>> def dense(g):
    ...     return g.to_dense() if is_slices(g) else g
    >>> print(jax.tree.map(dense, gradients, is_leaf=is_slices)["table"].shape)
    (4, 2)
    >>> jax.tree.map(lambda g: -0.1 * g, gradients, is_leaf=is_slices)["table"]
    IndexedSlices(values=f32[3,2], indices=i32[3], dense_shape=(4, 2))
    """

    __slots__ = ("_rows", "dense_shape", "values")

    values: Any
    _rows: Any  # the opaque row ids: see `row_ids`
    dense_shape: tuple[int, ...] | None

    # NumPy's operators then call the operators of this class.
    __array_ufunc__ = None

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None):
        self.values = jnp.asarray(values)
        indices = jnp.asarray(indices)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise TypeError(f"indices must be integers, not {indices.dtype}")
        self.dense_shape = _static_shape(dense_shape)
        if indices.ndim != 1 or self.values.shape[:1] != indices.shape:
            raise ValueError(
                "expected one index for each slice: values of shape [n, ...] and indices [n]; got "
                f"{list(self.values.shape)} and {list(indices.shape)}"
            )
        self._rows = opaque(row_indices(indices, (self.dense_shape or (0,))[0]))
        if self.dense_shape is not None and (
            not self.dense_shape or self.values.shape[1:] != self.dense_shape[1:]
        ):
            raise ValueError(
                f"slices of the shape {list(self.values.shape[1:])} are no rows of an array "
                f"{list(self.dense_shape)}"
            )

    @property
    def indices(self) -> Any:
        """The row of each slice, ``int[n]``."""
        return integers(self._rows)

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the dense array, `dense_shape`."""
        return self.dense_shape

    def __repr__(self) -> str:
        rows = self.indices if are_opaque(self._rows) else self._rows
        values, indices = map(_type_text, (self.values, rows))
        return f"IndexedSlices(values={values}, indices={indices}, dense_shape={self.dense_shape})"

    # ------------------------------------------------------------------------------------- dense

    def to_dense(self, dtype: Any = None) -> Any:
        """Returns the dense array that the slices stand for.

        Args:
          dtype: the expected dtype; the default is the dtype of the values.

        Raises:
          ValueError: the dense shape is unknown.
          TypeError: the values have another dtype than `dtype`.

        Warns:
          UserWarning: the array has 100 million elements or more.
        """
        shape = self._require_dense_shape()
        if int(np.prod(shape)) >= LARGE:
            size = int(np.prod(shape)) * self.dtype.itemsize / 2**20
            warnings.warn(
                f"turning {len(self.values)} slices of {self.dtype}{list(shape)} dense takes "
                f"{size:,.0f} MiB",
                stacklevel=2,
            )
        return self._to_dense(dtype)

    def _to_dense(self, dtype: Any = None) -> Any:
        if dtype is not None and jnp.dtype(dtype) != self.dtype:
            raise TypeError(
                f"the slices are {self.dtype}, but an array of {jnp.dtype(dtype)} is expected: "
                "convert the values of the slices"
            )
        return self._add_to_array(jnp.zeros(self._require_dense_shape(), self.dtype))

    def dense_as(self, aval: Any) -> Any:
        """Returns the dense array as the gradient of an array of type `aval`, without a warning for
        a large array. Slices without a dense shape get the shape of `aval`."""
        return self.shaped_as(aval)._to_dense()

    def shaped_as(self, aval: Any) -> IndexedSlices:
        """Gives slices without a dense shape the shape of `aval`, if it fits."""
        if self.dense_shape is not None or self.values.shape[1:] != aval.shape[1:]:
            return self
        return _make_slices_unchecked(self.values, self._rows, tuple(aval.shape))

    def astype(self, dtype: Any) -> IndexedSlices:
        """Returns the slices with values of another dtype."""
        return _make_slices_unchecked(self.values.astype(dtype), self._rows, self.dense_shape)

    def _add_to_array(self, array: Any) -> Any:
        values, indices = _to_integer_rows(self.values, self._rows)
        return jnp.asarray(array).at[indices].add(values, mode="drop")

    def _require_dense_shape(self) -> tuple[int, ...]:
        if self.dense_shape is None:
            raise ValueError(
                f"{self!r} has no dense shape, [rows, ...]: pass it as "
                "IndexedSlices(slices.values, slices.indices, dense_shape=table.shape)"
            )
        return self.dense_shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if _jax.is_tracer(self.values) or _jax.is_tracer(self._rows):
            raise TypeError(
                f"{self!r} is traced, and NumPy needs values: use .to_dense() for an array of JAX"
            )
        return np.asarray(self.to_dense(), dtype)

    # --------------------------------------------------------------------------------- arithmetic

    def deduplicated(self) -> IndexedSlices:
        """Returns slices in which each row occurs once, with the sum of its slices.

        The number of slices stays the same, because compiled functions need fixed shapes: the rows
        come first, in ascending order, then zeros with the index ``dense_shape[0]``, which is not a
        row.

        >>> import jax.numpy as jnp
        >>> slices = IndexedSlices(jnp.array([1.0, 2.0, 3.0]), jnp.array([2, 0, 2]), (5,))
        >>> print(slices.deduplicated().indices, slices.deduplicated().values)
        [0 2 5] [2. 4. 0.]
        """
        rows = self._require_dense_shape()[0]
        values, indices = _to_integer_rows(self.values, self._rows)
        indices = jnp.where(indices < 0, indices + rows, indices)
        is_row = (indices >= 0) & (indices < rows)
        indices = jnp.where(is_row, indices, rows)
        order = jnp.argsort(indices)
        indices = indices[order]
        values = jnp.where(_align_with_values(is_row, values), values, 0)[order]
        is_first = jnp.ones(indices.shape, bool).at[1:].set(indices[1:] != indices[:-1])
        place = jnp.cumsum(is_first) - 1
        return _make_slices_unchecked(
            jnp.zeros_like(values).at[place].add(values),
            opaque(jnp.full_like(indices, rows).at[place].set(indices)),
            self.dense_shape,
        )

    def __add__(self, other: Any) -> Any:
        """Adds other slices, by concatenation, or an array, which gives a dense array."""
        if isinstance(other, IndexedSlices):
            if (
                other.dense_shape != self.dense_shape
                or other.values.shape[1:] != (self.values.shape[1:])
            ):
                raise ValueError(f"cannot add {self!r} and {other!r}: their shapes differ")
            if other.dtype != self.dtype:
                raise TypeError(f"cannot add {self!r} and {other!r}: their dtypes differ")
            indices = jnp.concatenate([self.indices, other.indices])
            values = jnp.concatenate([self.values, other.values])
            return _make_slices_unchecked(values, opaque(indices), self.dense_shape)
        if type(other) is int and other == 0:  # what `sum` starts from
            return self
        if not _is_array(other):
            return NotImplemented
        if jnp.shape(other) != self._require_dense_shape():
            raise ValueError(f"cannot add {self!r} and an array {list(jnp.shape(other))}")
        if other.dtype != self.dtype:
            raise TypeError(f"cannot add {self!r} and an array of {other.dtype}")
        return self._add_to_array(other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __neg__(self) -> IndexedSlices:
        return _make_slices_unchecked(-self.values, self._rows, self.dense_shape)

    def __mul__(self, number: Any) -> IndexedSlices:
        """Multiplies the slices by a number, or by an array of shape ``[]``."""
        if not _is_number(number):
            return NotImplemented
        return _make_slices_unchecked(self.values * number, self._rows, self.dense_shape)

    __rmul__ = __mul__

    def __truediv__(self, number: Any) -> IndexedSlices:
        if not _is_number(number):
            return NotImplemented
        return _make_slices_unchecked(self.values / number, self._rows, self.dense_shape)


def _make_slices_unchecked(
    values: Any, rows: Any, dense_shape: tuple[int, ...] | None
) -> IndexedSlices:
    """Makes slices without checks: the parts fit, or JAX has put other objects in their place."""
    new = object.__new__(IndexedSlices)
    new.values, new._rows, new.dense_shape = values, rows, dense_shape
    return new


@jax.jit
def _to_integer_rows(values: Any, rows: Any) -> tuple[Any, Any]:
    """Returns the values and the integer row ids. If a gradient's arrays were filled with a number
    (see `row_ids`), the ids are not valid: zeros count for nothing, and any other value becomes NaN
    in the first row."""
    indices = integers(rows)
    if indices.ndim != 1:
        raise ValueError(
            f"IndexedSlices with row ids {list(indices.shape)} are of all steps of a jax.vmap or a "
            "jax.lax.scan. Map over them, as in jax.vmap(lambda s: s.to_dense())(slices); or, "
            "for their sum, IndexedSlices(slices.values.reshape(-1, *shape[1:]), "
            "slices.indices.ravel(), shape) with the shape of the table"
        )
    is_filled = are_filled(indices)
    if jnp.issubdtype(values.dtype, jnp.inexact):
        values = jnp.where(_align_with_values(is_filled, values) & (values != 0), jnp.nan, values)
    return values, jnp.where(is_filled, 0, indices)


def _flatten(slices: IndexedSlices) -> tuple[tuple[Any, Any], Any]:
    return (slices.values, slices._rows), slices.dense_shape


def _flatten_with_keys(slices: IndexedSlices) -> tuple[Any, Any]:
    key = jax.tree_util.GetAttrKey
    children = ((key("values"), slices.values), (key("indices"), slices._rows))
    return children, slices.dense_shape


def _unflatten(dense_shape: tuple[int, ...] | None, children: Any) -> IndexedSlices:
    values, rows = children
    return _make_slices_unchecked(values, rows, dense_shape)


jax.tree_util.register_pytree_with_keys(IndexedSlices, _flatten_with_keys, _unflatten, _flatten)


def is_slices(value: object) -> bool:
    return isinstance(value, IndexedSlices)


def row_indices(indices: Any, rows: Any) -> Any:
    """Converts row indices to ``int32`` or ``int64``, which can also hold the number of rows.

    The number of rows stands for an index that is not a row. An index that the new type cannot hold
    becomes the largest number of that type, which is not a row either.
    """
    limits: Callable[[Any], Any] = jnp.iinfo  # NumPy's does not know JAX's integers of 4 bits
    old = limits(indices.dtype)
    is_long = old.bits == 64 or (isinstance(rows, int) and rows > limits(np.int32).max)
    new = limits(jax.dtypes.canonicalize_dtype(np.int64 if is_long else np.int32))
    if old.max > new.max:
        indices = jnp.minimum(indices, np.array(new.max, old.dtype))
    return indices.astype(new.dtype)


def _static_shape(shape: Any) -> tuple[int, ...] | None:
    """Returns the shape as a tuple; None if it is unknown, or a part of it is traced."""
    if shape is None or _jax.is_tracer(shape) or any(map(_jax.is_tracer, shape)):
        return None
    # A dimension may be symbolic, and then is not an integer.
    return tuple(int(d) if isinstance(d, np.generic | jax.Array) else d for d in shape)


def _type_text(value: Any) -> str:
    try:
        return _jax.type_text(jax.typeof(value))
    except TypeError:  # a tree may hold anything in the places of arrays
        return repr(value)


def _is_array(value: object) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex | np.generic) or (
        _is_array(value) and jnp.shape(value) == ()
    )


def _align_with_values(flags: Any, values: Any) -> Any:
    """Reshapes flags ``[n]`` to ``[n, 1, ...]``."""
    return flags.reshape(flags.shape + (1,) * (values.ndim - 1))
