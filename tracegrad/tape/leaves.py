"""Checks the arguments of tapes (targets, sources, seeds), and returns their arrays."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad.differentiation.gradient_types import as_inexact
from tracegrad.differentiation.indexed_slices import IndexedSlices, is_slices
from tracegrad.ir.paths import is_named_alike, path_name
from tracegrad.ir.wording import brief, listed, with_article
from tracegrad.tracing.leaves import leaves_with_paths
from tracegrad.tracing.nnx_objects import refuse_hijax
from tracegrad.variables.trees import is_variable
from tracegrad.variables.variable import Variable


class UnconnectedGradients(enum.Enum):
    """The gradient that a tape returns for a source that is not connected to the target.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> x = jnp.float32(3.0)
    >>> with tg.GradientTape(persistent=True) as tape:
    ...     tape.watch(x)
    ...     y = jnp.round(x)
    >>> print(tape.gradient(y, x))
    None
    >>> print(tape.gradient(y, x, unconnected_gradients=tg.UnconnectedGradients.ZERO))
    0.0
    """

    NONE = "none"
    ZERO = "zero"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"unconnected_gradients is 'none' or 'zero'; got {value!r}")


Unconnected = UnconnectedGradients | Literal["none", "zero"]  # as users may write it


_ARRAYS = (jax.Array, Variable, np.ndarray, np.generic)


_ATTRIBUTES = (jax.tree_util.GetAttrKey, jax.tree_util.FlattenedIndexKey)


def are_known_arrays(leaves: Sequence[Any]) -> bool:
    """Whether all leaves are JAX arrays or Variables; False without leaves."""
    for leaf in leaves:
        if not isinstance(leaf, (Variable, jax.Array)):
            return False
    return bool(leaves)


def must_be_arrays(tree: Any) -> list[bool]:
    """Says for each leaf of a tree whether it must be an array: every leaf but settings of a model.

    Settings are functions, and attributes of objects that are no arrays (a rate, a name). A number
    or a string in a list is no setting.
    """
    return [not _is_setting(path, leaf) for path, leaf in _with_paths(tree, is_variable)]


def _is_setting(path: Sequence[Any], leaf: Any) -> bool:
    if not path or isinstance(leaf, (jax.Array, Variable)):
        return False
    refuse_hijax(leaf)
    return callable(leaf) or isinstance(path[-1], _ATTRIBUTES)


def _with_paths(tree: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]


def arrays_of(target: Any, role: str = "target") -> tuple[list[Any], dict[Variable, Any]]:
    """Returns the arrays of a target, and maps its Variables to their values."""
    if isinstance(target, jax.Array):  # the common case
        return [target], {}
    leaves = jax.tree.leaves(target, is_leaf=_is_variable_or_none)
    if not are_known_arrays(leaves):
        require_arrays(role, target, leaves)
    variables = {leaf: leaf.value for leaf in leaves if isinstance(leaf, Variable)}
    if variables:
        leaves = [variables[v] if isinstance(v, Variable) else v for v in leaves]
    return leaves, variables


def _is_variable_or_none(leaf: Any) -> bool:
    return leaf is None or is_variable(leaf)


def cure_of(leaf: Any) -> str:
    """How to give the arrays of a leaf that is no array and no Variable, for a message."""
    if hasattr(leaf, "__dict__"):
        return "Of a model with Variables, give tracegrad.variables_of(model)"
    return "Convert it with jnp.asarray, and use the result"


def require_arrays(role: str, tree: Any, leaves: Sequence[Any], *, settings: bool = False) -> None:
    """Raises TypeError, with the path in the tree, for a leaf that is no array and no Variable.

    `settings`: whether settings of models are allowed; see `must_be_arrays`.
    """
    if tree is not None and all(isinstance(leaf, _ARRAYS) for leaf in leaves):
        return
    for path, leaf in _with_paths(tree, _is_variable_or_none):
        is_allowed = settings and path and (leaf is None or _is_setting(path, leaf))
        if not isinstance(leaf, _ARRAYS) and not is_allowed:
            raise TypeError(
                f"{with_article(role)} is an array or a Variable"
                + (f"; {path_name(path, role)}" if path else ", or a tree of them; it")
                + f" is {brief(leaf)}"
                + (f". {cure_of(leaf)}" if hasattr(leaf, "__dict__") else "")
            )
    for leaf in leaves:
        if not settings and not isinstance(leaf, _ARRAYS):
            raise TypeError(
                f"{with_article(role)} is one array or Variable, no tree of them, and not "
                f"{with_article(type(leaf).__name__)}: pass jax.tree.leaves of it, or use a "
                "GradientTape"
            )


def one_array(target: Any, role: str = "target") -> tuple[Any, dict[Variable, Any]]:
    """Like `arrays_of`; raises ValueError unless there is exactly one array."""
    arrays, variables = arrays_of(target, role)
    if len(arrays) != 1:
        raise ValueError(f"a Jacobian takes one array as its {role}; there are {len(arrays)}")
    return arrays[0], variables


def require_real(target: Any) -> Any:
    if jnp.iscomplexobj(target):
        raise TypeError(
            f"the target is {target.dtype}: take the Jacobians of its real and of its imaginary "
            "part, which are real"
        )
    return target


def require_batches(target: Any, source: Any) -> None:
    """Raises ValueError unless both arrays are ``[batch, ...]`` with the same batch size."""
    shapes = jnp.shape(target), jnp.shape(source)
    if min(map(len, shapes)) < 2:
        raise ValueError(
            f"batch_jacobian takes arrays with a batch axis and at least one more; the target "
            f"has the shape {shapes[0]}, the source {shapes[1]}"
        )
    if shapes[0][0] != shapes[1][0]:
        raise ValueError(
            f"the batch size of the target is {shapes[0][0]}, and of the source {shapes[1][0]}"
        )


def seeds_for(
    target: Any, targets: Sequence[Any], output_gradients: Any, name: str = "output_gradients"
) -> list[Any]:
    """Checks `output_gradients`, and returns the seeds of a backward pass; None stands for ones.

    Args:
      targets: the arrays of the tree `target`.
      name: the name of the argument with the seeds, for messages.

    Python numbers and NumPy integers are converted to the dtype of the target. Raises ValueError
    for a wrong number, structure or shape of seeds, TypeError for a wrong dtype, and TypeError for
    a complex target without a seed.
    """
    if output_gradients is None:
        return [_check_seed(array, None, name) for array in targets]
    seeds = leaves_with_paths(output_gradients, NoneType, IndexedSlices)
    if len(seeds) != len(targets):
        raise ValueError(
            f"{name} has {len(seeds)} arrays, the target {len(targets)}: give one (or "
            "None) for each"
        )
    leaves = leaves_with_paths(target)
    if not is_named_alike(seeds, leaves):
        of_seeds, of_target = ([path_name(path) for path, _ in tree] for tree in (seeds, leaves))
        raise ValueError(
            f"{name} has {listed(of_seeds, 5)}, the target {listed(of_target, 5)}: give a list, "
            "or the same keys in the same order"
        )
    return [_check_seed(array, seed, name) for array, (_, seed) in zip(targets, seeds, strict=True)]


def _check_seed(target: Any, seed: Any, name: str) -> Any:
    """Checks a seed, and converts it to the target's type; None stands for ones."""
    if seed is None:
        if getattr(getattr(target, "dtype", None), "kind", "") == "c":
            raise TypeError(
                f"the target is {target.dtype}: say with {name} which combination of "
                "real and imaginary part to differentiate"
            )
        return None
    aval = jax.typeof(target)
    if is_slices(seed):
        seed = seed.dense_as(aval)
    seed = jnp.asarray(as_inexact(seed, aval.dtype))
    if seed.shape != jnp.shape(target):
        raise ValueError(
            f"one of {name} has the shape {seed.shape}, its target {jnp.shape(target)}"
        )
    if seed.dtype != target.dtype:
        raise TypeError(f"one of {name} is {seed.dtype}, its target {target.dtype}")
    return seed
