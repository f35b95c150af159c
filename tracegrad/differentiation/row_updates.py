"""How an optimiser updates the rows of a table that have a gradient, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad.differentiation.indexed_slices import IndexedSlices
from tracegrad.ir.wording import brief


def apply_rows(table: Any, slices: IndexedSlices, fn: Callable[[Any, Any], Any]) -> Any:
    """Updates the rows of a table for which there is a gradient, and leaves the others alone.

    This is how an optimiser with a state treats sparse gradients: no other row of the table or of
    the state is read or written, so that a step costs in proportion to the lookups (where the
    table is donated to the compiled function, or it would be copied).

    Args:
      table: an array ``[rows, ...]``, or a tree of arrays with as many rows each: the table and
        what the optimiser keeps for its rows.
      slices: the gradient. Slices of the same row are added up first.
      fn: ``(rows, gradients) -> new rows``. `rows` is a tree like `table` of the rows with a
        gradient, each ``[n, ...]``, `gradients` is ``[n, ...]``; it returns a tree like `rows`.
        There may be some rows more than needed in it, of which the result is not used.

    Returns:
      A tree like `table`.

    Raises:
      TypeError: the slices are none.
      ValueError: an array has another number of rows than the slices are of, or `fn` returned
        another shape.

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
            f"apply_rows takes IndexedSlices, which a derivative with sparse=True gives; it was "
            f"given {brief(slices)}"
        )
    count = slices._known_shape()[0]
    table = jax.tree.map(jnp.asarray, table)  # arrays in place of Variables, which are trees
    for leaf in jax.tree.leaves(table):
        if jnp.shape(leaf)[:1] != (count,):
            raise ValueError(
                f"the gradient is that of a table of {count} rows; one of the arrays to update is "
                f"{list(jnp.shape(leaf))}"
            )
    unique = slices.deduplicated()
    rows = read_rows(table, unique)
    return write_rows(table, unique, fn(rows, unique.values))


def read_rows(table: Any, unique: IndexedSlices) -> Any:
    """The rows of the arrays of a tree for which there are slices, one for each row."""
    return jax.tree.map(lambda leaf: leaf.at[unique.indices].get(mode="clip"), table)


def write_rows(table: Any, unique: IndexedSlices, rows: Any) -> Any:
    """The arrays of a tree with others in the places of those rows."""

    def written(leaf: Any, new: Any) -> Any:
        old = (*unique.indices.shape, *jnp.shape(leaf)[1:])
        if jnp.shape(new) != old:
            raise ValueError(
                f"the function of apply_rows returned {list(jnp.shape(new))} for rows of the shape "
                f"{list(old)}"
            )
        return leaf.at[unique.indices].set(new, mode="drop")

    return jax.tree.map(written, table, rows)
