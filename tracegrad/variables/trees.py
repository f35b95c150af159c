"""Variables in trees: among the arguments of a call, and in the user's models.

Among the arguments of a traced function, a Variable is not an array but a node of the structure
(`VariableNode`), so each Variable has a program of its own. The function reads and assigns the
Variable like a Variable that it closes over.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.ir.paths import path_name
from tracegrad.variables.variable import Variable

T = TypeVar("T")

# For ``is_leaf=``, to get the Variables themselves and not their values. (In C, since JAX calls it
# for every node of a tree.)
is_variable = Variable.__instancecheck__


class VariableNode:
    """A Variable among arguments, as node data of their structure; one for each Variable."""

    __slots__ = ("__weakref__", "_ref", "_text")

    def __init__(self, variable: Variable):
        # JAX's caches keep this `VariableNode`, and must not keep the Variable alive.
        self._ref = weakref.ref(variable)
        self._text = f"<Variable {variable.name}>"

    @property
    def variable(self) -> Variable:
        variable = self._ref()
        assert variable is not None, "the caller of the function holds it"
        return variable

    def __repr__(self) -> str:
        return self._text


def node_of_variable(variable: Variable) -> VariableNode:
    if variable._node is None:
        variable._node = VariableNode(variable)
    node: VariableNode = variable._node
    return node


class _Finding(threading.local):
    """The list to which `_flatten` adds the Variables of a tree; None: JAX gets their values.

    `_flatten` runs for Variables only, so other nodes of the tree cost nothing.
    """

    found: list[VariableNode] | None = None


_finding = _Finding()


# The leaf is handed out, so the next program that assigns the Variable copies it, once. Counting
# references to the leaf could not avoid this copy: `jax.device_put` makes arrays that share the
# leaf's buffer without a reference to the leaf, and a donation would delete them.
def _flatten(variable: Variable) -> tuple[tuple[Any, ...], Any]:
    if _finding.found is None:
        return (variable.value,), "value"  # equal node data for all Variables
    given = node_of_variable(variable)
    _finding.found.append(given)
    return (), given


def _flatten_with_keys(variable: Variable) -> tuple[tuple[tuple[Any, Any], ...], Any]:
    leaves, origin = _flatten(variable)
    return tuple((jax.tree_util.GetAttrKey("value"), leaf) for leaf in leaves), origin


def _unflatten(origin: Any, children: Iterable[Any]) -> Any:
    if type(origin) is VariableNode:
        return origin.variable
    (value,) = children
    return value


jax.tree_util.register_pytree_with_keys(Variable, _flatten_with_keys, _unflatten, _flatten)


@contextmanager
def finding_variables() -> Iterator[None]:
    """A block in which flattening a tree makes each of its Variables a node of the structure, and
    reads none."""
    _finding.found = []
    try:
        yield
    finally:
        _finding.found = None


def flatten_finding_variables(
    tree: Any, found: list[VariableNode], is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Any]:
    """Flattens a tree as in `finding_variables`; returns its leaves and structure, and adds the
    nodes of its Variables to `found`."""
    # Not by `finding_variables`: each call runs this, and a context manager is slower.
    _finding.found = found
    try:
        return jax.tree.flatten(tree, is_leaf)
    finally:
        _finding.found = None


# ------------------------------------------------------------------------------------------ values


def without_variables(tree: T) -> T:
    """Reads the Variables of a tree now: JAX would read them when it flattens the tree, after the
    listeners of the function have stopped. A tree without Variables is returned itself."""
    if any(isinstance(leaf, Variable) for leaf in jax.tree.leaves(tree, is_leaf=is_variable)):
        tree = values_of(tree)
    return tree


def as_variables(tree: T, name: str = "") -> T:
    """Returns the same tree with a `Variable` in the place of each array, named by its path.

    So the parameters of a layer, also of another library's, become Variables: tapes watch them,
    traced functions assign them, and messages name them: ``params.dense.kernel``. Variables of
    integers are not trainable. Leaves that are not arrays stay as they are.

    A tree with Variables has another structure than its gradients. Functions of several trees, such
    as `optax.apply_updates`, need the values: call `values_of` before them, and `assign_values`
    after.

    Args:
      tree: a tree of arrays.
      name: the prefix of the names of the Variables.

    >>> import jax.numpy as jnp, optax, tracegrad as tg
    >>> dense = {"kernel": jnp.ones((2, 1)), "bias": jnp.zeros(1)}
    >>> params = tg.as_variables({"dense": dense}, "params")
    >>> print([variable.name for variable in params["dense"].values()])
    ['params.dense.bias', 'params.dense.kernel']
    >>> optimiser = optax.sgd(0.5)
    >>> memory = optimiser.init(tg.values_of(params))
    >>> with tg.GradientTape() as tape:
    ...     out = jnp.ones((4, 2)) @ params["dense"]["kernel"] + params["dense"]["bias"]
    ...     loss = jnp.mean(out**2)
    >>> gradients = tape.gradient(loss, params)
    >>> updates, memory = optimiser.update(gradients, memory, tg.values_of(params))
    >>> tg.assign_values(params, optax.apply_updates(tg.values_of(params), updates))
    >>> print(params["dense"]["kernel"].value.ravel(), params["dense"]["bias"].value)
    [-1. -1.] [-2.]
    """
    nodes, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)
    leaves = [
        Variable(leaf, bool(_jax.has_gradient(jnp.asarray(leaf))), path_name(path, name) or None)
        if isinstance(leaf, jax.Array | np.ndarray)
        else leaf
        for path, leaf in nodes
    ]
    new: T = jax.tree.unflatten(structure, leaves)
    return new


def values_of(tree: Any) -> Any:
    """Returns the same tree with the value of each Variable in its place.

    >>> values_of({"w": Variable([1.0, 2.0]), "step": 3})
    {'step': 3, 'w': Array([1., 2.], dtype=float32)}
    """
    return jax.tree.map(
        lambda x: x.value if isinstance(x, Variable) else x, tree, is_leaf=is_variable
    )


def assign_values(tree: Any, values: Any) -> None:
    """Assigns to each Variable of a tree the value in the same place of another tree.

    Other leaves of `tree` stay as they are. Nothing is assigned if one of the values does not fit.

    Raises:
      ValueError: the structures of the trees differ, or a shape differs.
      TypeError: a dtype differs.

    >>> import jax, optax
    >>> weights = {"w": Variable([1.0, 2.0]), "b": Variable(0.5)}
    >>> loss = lambda p, x: p["w"] @ x + p["b"]
    >>> optimiser = optax.sgd(0.25)
    >>> params = values_of(weights)
    >>> state = optimiser.init(params)
    >>> grads = jax.grad(loss)(params, jax.numpy.ones(2))
    >>> updates, state = optimiser.update(grads, state)
    >>> assign_values(weights, optax.apply_updates(params, updates))
    >>> print(weights["w"].value, weights["b"].value)
    [0.75 1.75] 0.25
    """
    pairs: list[tuple[Variable, Any]] = []

    def pair(leaf: Any, value: Any) -> None:
        if isinstance(leaf, Variable):
            pairs.append((leaf, leaf._checked(value)))

    jax.tree.map(pair, tree, values, is_leaf=is_variable)
    for variable, value in pairs:
        variable.assign(value)
