"""Optimisers for trees in which some gradients are `IndexedSlices`: they move the rows that were
looked up, and no others.

They are optax's `GradientTransformation`s (a pair of functions, `init` and `update`), so
`optax.chain`, `optax.apply_updates` and `flax.nnx.Optimizer` take them. The moments of a table are
tables; of those, too, the looked-up rows alone are read and written, so that a step costs in
proportion to the lookups (where the state is donated, or it is copied).

A gradient that is an array is treated as if all of its rows had been looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tracegrad.differentiation.indexed_slices import IndexedSlices, is_slices
from tracegrad.differentiation.row_updates import read_rows, write_rows

LearningRate = float | Callable[[Any], Any]
# Of the number of the step, from 1, a gradient and the moments of the same rows: the direction down
# the learning rate, and the new moments.
Rule = Callable[..., tuple[Any, ...]]


class GradientTransformation(NamedTuple):
    """What optax calls so: ``init(params) -> state``, and ``update(gradients, state, params=None)
    -> (updates, state)``."""

    init: Callable[[Any], SparseState]
    update: Callable[..., tuple[Any, SparseState]]


class SparseState(NamedTuple):
    """`count`: the steps that were taken, ``int32[]``; `moments`: trees like the parameters."""

    count: Any
    moments: tuple[Any, ...]


def sparse_sgd(
    learning_rate: LearningRate, momentum: float | None = None
) -> GradientTransformation:
    """Stochastic gradient descent, with a momentum of the rows that are looked up.

    Args:
      learning_rate: a number, or a function of the number of steps before.
      momentum: what stays of a row's momentum when the row is looked up again; None for none. A row
        that is not looked up keeps its momentum and is not moved by it, as in TensorFlow.

    Returns:
      An optax transformation; see `sparse_adam`.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> optimizer = tg.sparse_sgd(0.5, momentum=0.9)
    >>> slices = tg.IndexedSlices(jnp.array([1.0]), jnp.array([2]), (4,))
    >>> _, state = optimizer.update(slices, optimizer.init(jnp.zeros(4)))
    >>> updates, state = optimizer.update(slices, state)
    >>> print(jnp.zeros(4) + updates, state.moments[0])
    [ 0.    0.   -0.95  0.  ] [0.  0.  1.9 0. ]
    """

    def rule(count: Any, gradient: Any, *moments: Any) -> tuple[Any, ...]:
        if momentum is None:
            return (gradient,)
        direction = gradient + momentum * moments[0]
        return direction, direction

    return _by_rows(rule, learning_rate, () if momentum is None else (0.0,))


def sparse_adagrad(
    learning_rate: LearningRate,
    initial_accumulator_value: float = 0.1,
    eps: float = 1e-7,
) -> GradientTransformation:
    """Adagrad (Duchi et al. 2011), of the rows that are looked up.

    Args:
      learning_rate: a number, or a function of the number of steps before.
      initial_accumulator_value: what the sums of squares start from.
      eps: is added to their root.

    Returns:
      An optax transformation; see `sparse_adam`.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> optimizer = tg.sparse_adagrad(0.5, initial_accumulator_value=0.0)
    >>> slices = tg.IndexedSlices(jnp.array([3.0, 1.0]), jnp.array([2, 2]), (4,))
    >>> updates, state = optimizer.update(slices, optimizer.init(jnp.zeros(4)))
    >>> print(jnp.zeros(4) + updates, state.moments[0])
    [ 0.   0.  -0.5  0. ] [ 0.  0. 16.  0.]
    """

    def rule(count: Any, gradient: Any, squares: Any) -> tuple[Any, ...]:
        squares = squares + gradient**2
        return gradient / (jnp.sqrt(squares) + eps), squares

    return _by_rows(rule, learning_rate, (initial_accumulator_value,))


def sparse_adam(
    learning_rate: LearningRate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> GradientTransformation:
    """Adam (Kingma and Ba 2015) whose moments of a row change when the row is looked up.

    As ``torch.optim.SparseAdam``: the row's moments are as old as its last lookup, and the
    correction of their bias counts all steps. ``tf.keras``' Adam has all rows move, and their
    moments decay, in each step.

    Args:
      learning_rate: a number, or a function of the number of steps before.
      b1, b2: what stays of the first and the second moment.
      eps: is added to the root of the second moment, before its bias is corrected.

    Returns:
      An optax transformation of trees of arrays and `IndexedSlices`. The updates of a table are
      slices, which `optax.apply_updates` adds.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> params = {"table": jnp.ones((5, 2)), "bias": jnp.zeros(2)}
    >>> def loss(params, ids):
    ...     return jnp.sum((params["table"][ids] + params["bias"]) ** 2)
    >>> optimizer = tg.sparse_adam(0.1)
    >>> state = optimizer.init(params)
    >>> every = lambda path, leaf: True
    >>> gradients = tg.grad(loss, wrt=every, sparse=True)(params, jnp.array([3, 0, 3]))
    >>> updates, state = optimizer.update(gradients, state)
    >>> updates["table"]
    IndexedSlices(values=f32[3,2], indices=i32[3], dense_shape=(5, 2))
    >>> print([f"{x:.2f}" for x in (params["table"] + updates["table"])[:, 0]])
    ['0.90', '1.00', '1.00', '0.90', '1.00']
    """

    def rule(count: Any, gradient: Any, first: Any, second: Any) -> tuple[Any, ...]:
        first = b1 * first + (1 - b1) * gradient
        second = b2 * second + (1 - b2) * gradient**2
        steps = count.astype(jnp.promote_types(gradient.dtype, jnp.float32))
        scale = jnp.sqrt(1 - b2**steps) / (1 - b1**steps)
        return (scale * first / (jnp.sqrt(second) + eps)).astype(gradient.dtype), first, second

    return _by_rows(rule, learning_rate, (0.0, 0.0))


def global_norm(tree: Any) -> Any:
    """The norm of all numbers of a tree of arrays and `IndexedSlices`, ``float[]``.

    Slices of the same row are added up first, as in the array that they stand for. As
    `optax.global_norm`, which does not take slices.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> slices = tg.IndexedSlices(jnp.array([1.0, 2.0]), jnp.array([4, 4]), (9,))
    >>> print(tg.global_norm({"table": slices, "bias": jnp.array([4.0])}))
    5.0
    """
    arrays = [
        leaf.deduplicated().values if is_slices(leaf) else leaf
        for leaf in jax.tree.leaves(tree, is_leaf=is_slices)
    ]
    return jnp.sqrt(sum((jnp.sum(jnp.abs(array) ** 2) for array in arrays), jnp.zeros(())))


def _by_rows(
    rule: Rule, learning_rate: LearningRate, beginnings: tuple[float, ...]
) -> GradientTransformation:
    """A rule as a transformation; `beginnings`: what each moment is at first."""

    def init(params: Any) -> SparseState:
        def begun(value: float) -> Any:
            return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), params)

        return SparseState(jnp.zeros((), jnp.int32), tuple(map(begun, beginnings)))

    def update(gradients: Any, state: SparseState, params: Any = None) -> tuple[Any, SparseState]:
        count = state.count + 1
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate

        def of_array(gradient: Any, *moments: Any) -> tuple[Any, ...]:
            direction, *new = rule(count, gradient, *moments)
            return (-rate * direction).astype(direction.dtype), *new

        def of_leaf(gradient: Any, *moments: Any) -> tuple[Any, ...]:
            if not is_slices(gradient):
                return of_array(gradient, *moments)
            unique = gradient.deduplicated()
            rows = read_rows(moments, unique)
            change, *new = of_array(unique.values, *rows)
            updated = IndexedSlices(change, unique.indices, unique.dense_shape)
            return updated, *write_rows(moments, unique, tuple(new))

        structure: Any
        leaves, structure = jax.tree.flatten(gradients, is_leaf=is_slices)
        tables = [structure.flatten_up_to(tree) for tree in state.moments]
        found = [of_leaf(*each) for each in zip(leaves, *tables, strict=True)]
        trees = [
            jax.tree.unflatten(structure, [each[k] for each in found])
            for k in range(1 + len(beginnings))
        ]
        return trees[0], SparseState(count, tuple(trees[1:]))

    return GradientTransformation(init, update)
