"""`stop_gradient`: makes values constants to differentiation."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from tracegrad import _jax
from tracegrad.annotations.calls import is_array_like
from tracegrad.ir.paths import path_name
from tracegrad.ir.wording import brief

T = TypeVar("T")


def stop_gradient(tree: T) -> T:
    """Returns the same values, as constants to differentiation.

    Arguments:
        tree: an array or Python number, or any tree of them, of any shapes and dtypes.

    Returns:
        The same tree. No derivative, of any order, in reverse or forward mode, goes through the
        tree.

    Raises:
        TypeError: a leaf is neither an array nor a number; the message gives its path.

    A straight-through rounding: the forward value is rounded, the gradient is the gradient of x.

    >>> import jax, jax.numpy as jnp
    >>> def quantised(x):
    ...     return x + stop_gradient(jnp.round(x) - x)
    >>> print(quantised(1.7), jax.grad(quantised)(1.7))
    2.0 1.0

    It corresponds to ``tf.stop_gradient``, but also takes trees. It applies
    ``jax.lax.stop_gradient`` to each leaf; integers have no derivative anyway.
    """

    def stopped(path: Any, leaf: Any) -> Any:
        if not is_array_like(leaf):
            place = path_name(path)
            raise TypeError(
                f"stop_gradient takes arrays, numbers and trees of them; "
                f"{'the leaf at ' + place if place else 'it'} is {brief(leaf)}. "
                "Take the arrays out of the object first."
            )
        # To a tape that is told later to watch the leaf, the leaf itself would be no constant.
        return _jax.as_another_object(jax.lax.stop_gradient(leaf), [leaf])

    stopped_tree: T = jax.tree_util.tree_map_with_path(stopped, tree)
    return stopped_tree
