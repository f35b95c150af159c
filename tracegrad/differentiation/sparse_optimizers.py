"""Optimisers for trees in which some gradients are `IndexedSlices`: they update only the looked-up
rows.

They have the form of optax's `GradientTransformation` (a pair of functions, `init` and `update`),
so `optax.chain`, `optax.apply_updates` and `flax.nnx.Optimizer` accept them. The moments of a table
are tables as well, and only their looked-up rows are read and written. So the cost of a step is
proportional to the number of lookups, provided that the state is donated; otherwise the state is
copied.

A gradient that is an array is treated as if all of its rows had been looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad.differentiation.indexed_slices import IndexedSlices, is_slices
from tracegrad.differentiation.row_updates import read_rows, write_rows
from tracegrad.ir.paths import path_name
from tracegrad.tracing.leaves import leaves_with_paths

LearningRate = float | Callable[[Any], Any]
# Takes the number of the step (from 1), a gradient, and the moments of the same rows. Returns the
# direction, which is multiplied by minus the learning rate, and the new moments.
Rule = Callable[..., tuple[Any, ...]]


class GradientTransformation(NamedTuple):
    """The same pair as in optax: ``init(params) -> state``, and ``update(gradients, state,
    params=None) -> (updates, state)``."""

    init: Callable[[Any], SparseState]
    update: Callable[..., tuple[Any, SparseState]]


class SparseState(NamedTuple):
    """`count`: the number of steps so far, ``int32[]``; `moments`: trees like the parameters."""

    count: Any
    moments: tuple[Any, ...]


def sparse_sgd(
    learning_rate: LearningRate, momentum: float | None = None
) -> GradientTransformation:
    """Stochastic gradient descent, with momentum for the rows that are looked up.

    Args:
      learning_rate: a number, or a function of the number of previous steps.
      momentum: the factor of a row's momentum when the row is looked up again; None for no
        momentum. A row that is not looked up keeps its momentum and does not move, as in
        TensorFlow.

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

    return _make_optimizer(rule, learning_rate, () if momentum is None else (0.0,))


def sparse_adagrad(
    learning_rate: LearningRate,
    initial_accumulator_value: float = 0.1,
    eps: float = 1e-7,
) -> GradientTransformation:
    """Adagrad (Duchi et al. 2011) for the rows that are looked up.

    Args:
      learning_rate: a number, or a function of the number of previous steps.
      initial_accumulator_value: the initial value of the sums of squares.
      eps: a number that is added to the square root of the sums.

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

    return _make_optimizer(rule, learning_rate, (initial_accumulator_value,))


def sparse_adam(
    learning_rate: LearningRate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> GradientTransformation:
    """Adam (Kingma and Ba 2015) that changes the moments of a row only when the row is looked up.

    As in ``torch.optim.SparseAdam``, the moments of a row do not decay between lookups, and the
    bias correction counts all steps. In contrast, Adam of ``tf.keras`` moves all rows and decays
    their moments in each step.

    Args:
      learning_rate: a number, or a function of the number of previous steps.
      b1, b2: the decay factors of the first and the second moment.
      eps: a number that is added to the square root of the second moment, before bias correction.

    Returns:
      An optax transformation of trees of arrays and `IndexedSlices`. The updates of a table are
      slices, which `optax.apply_updates` adds. `update` raises ValueError for a gradient whose
      shape is not that of its moments.

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
        steps = count.astype(np.promote_types(gradient.dtype, np.float32))
        scale = jnp.sqrt(1 - b2**steps) / (1 - b1**steps)
        step = scale * first.astype(scale.dtype) / (jnp.sqrt(second) + eps).astype(scale.dtype)
        return step.astype(gradient.dtype), first, second

    return _make_optimizer(rule, learning_rate, (0.0, 0.0))


def global_norm(tree: Any) -> Any:
    """Returns the norm of all numbers in a tree of arrays and `IndexedSlices`, ``float[]``.

    Slices of the same row are added up first, as in the dense array. For arrays alone, the norm is
    the norm of `optax.global_norm`.

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


def _make_optimizer(
    rule: Rule, learning_rate: LearningRate, beginnings: tuple[float, ...]
) -> GradientTransformation:
    """`beginnings` has the initial value of each moment."""

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
        if tables:
            _require_shapes(gradients, tables[0])
        found = [of_leaf(*each) for each in zip(leaves, *tables, strict=True)]
        trees = [
            jax.tree.unflatten(structure, [each[k] for each in found])
            for k in range(1 + len(beginnings))
        ]
        return trees[0], SparseState(count, tuple(trees[1:]))

    return GradientTransformation(init, update)


def _require_shapes(gradients: Any, moments: Sequence[Any]) -> None:
    """Raises ValueError, with the path, for a gradient of another shape than the moments of its
    parameter."""
    leaves = leaves_with_paths(gradients, IndexedSlices)
    for (path, gradient), moment in zip(leaves, moments, strict=True):
        shape = gradient.shape if is_slices(gradient) else jnp.shape(gradient)
        if shape not in (None, jnp.shape(moment)):
            raise ValueError(
                f"{path_name(path, 'gradients')} is the gradient of an array of shape "
                f"{list(shape)}; the optimiser was given a parameter of shape "
                f"{list(jnp.shape(moment))} there. Is it the gradient of another parameter?"
            )
