"""`apply_rows`: updates only the rows of a table that have a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad.differentiation.indexed_slices import IndexedSlices
from tracegrad.ir.wording import brief


def apply_rows(table: Any, slices: IndexedSlices, fn: Callable[[Any, Any], Any]) -> Any:
    """Updates the rows of a table that have a gradient, and leaves the other rows unchanged.

    Optimisers with a state use this function for sparse gradients: no other row of the table or of
    the state is read or written. So the cost of a step is proportional to the number of lookups,
    provided that the table is donated to the compiled function; otherwise the table is copied.

    Args:
      table: an array ``[rows, ...]``, or a tree of arrays with the same number of rows: the table
        and the optimiser's state for its rows.
      slices: the gradient. Slices of the same row are added up first.
      fn: ``(rows, gradients) -> new rows``. `rows` is a tree like `table` that holds the rows with
        a gradient, ``[n, ...]`` for each array; `gradients` is ``[n, ...]``. `fn` returns a tree
        like `rows`. `rows` may contain more rows than needed; their results are discarded.

    Returns:
      A tree like `table`.

    Raises:
      TypeError: `slices` are not `IndexedSlices`.
      ValueError: the number of rows of an array differs from the dense shape of the slices, or
        `fn` returned arrays of another shape.

    Row-wise adagrad, which keeps one number for each row:

    >>> import jax.numpy as jnp
    >>> def adagrad(rows, gradients):
    ...     table, squares = rows
    ...     squares = squares + jnp.mean(gradients**2, axis=1)
    ...     return table - 0.5 * gradients / jnp.sqrt(squares)[:, None], squares
    >>> gradient = IndexedSlices(jnp.full((2, 2), 3.0), jnp.array([2, 2]), (4, 2))
    >>> table, squares = apply_rows((jnp.zeros((4, 2)), jnp.zeros(4)), gradient, adagrad)
    >>> print(table[2], squares)
    [-0.5 -0.5] [ 0.  0. 36.  0.]
    """
    if not isinstance(slices, IndexedSlices):
        raise TypeError(
            f"apply_rows takes IndexedSlices, which a derivative with sparse=True returns; it got "
            f"{brief(slices)}"
        )
    count = slices._require_dense_shape()[0]
    table = jax.tree.map(jnp.asarray, table)  # replaces Variables, which are trees, by arrays
    for leaf in jax.tree.leaves(table):
        if jnp.shape(leaf)[:1] != (count,):
            raise ValueError(
                f"the gradient belongs to a table of {count} rows; one of the arrays to update has "
                f"the shape {list(jnp.shape(leaf))}"
            )
    unique = slices.deduplicated()
    indices = unique.indices

    def write(leaf: Any, new: Any) -> Any:
        old = (*indices.shape, *jnp.shape(leaf)[1:])
        if jnp.shape(new) != old:
            raise ValueError(
                f"the function given to apply_rows returned {list(jnp.shape(new))} for rows "
                f"of shape {list(old)}"
            )
        return leaf.at[indices].set(new, mode="drop")

    rows = jax.tree.map(lambda leaf: leaf.at[indices].get(mode="clip"), table)
    return jax.tree.map(write, table, fn(rows, unique.values))
