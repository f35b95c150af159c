"""What arguments are made of: arrays, Variables, and whatever else users' objects hold.

Among the arguments of a traced function a Variable is no array but a part of their structure
(`Given`), so that there is a program for each that is given; in the function it is read and
assigned like one that the function closes over. What else is no array is one too (`statics`).

A module of flax.nnx is arrays, which the function may assign, and a structure (`modules`).

JAX takes Variables apart by itself where a call goes to it directly, which is where no call had any
before. The traced values in their places then tell whose they are, once.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.variables.leaves import Leaf, path_name
from tracegrad.variables.modules import Held, Structure, hold, is_whole, structures_in
from tracegrad.variables.statics import Given, are_arrays, fix, given_of, is_variable
from tracegrad.variables.variable import Variable

T = TypeVar("T")


class _Pass(threading.local):
    """What a pass over a tree does with the Variables in it. By way of the functions by which JAX
    flattens and unflattens them, so that it costs nothing for what else is in the tree."""

    found: list[Given] | None = None  # Variables become parts of the structure, and are put here
    takes = False  # the Variables themselves come back in the places of such parts


_pass = _Pass()


class _Whose:
    """Whose value a leaf is, as a tree knows it. All are equal: trees with Variables in the same
    places have the same structure."""

    __slots__ = ("variable",)

    def __init__(self, variable: Variable):
        self.variable = weakref.ref(variable)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Whose)

    def __hash__(self) -> int:
        return hash(_Whose)

    def __repr__(self) -> str:
        return "value"


# The leaf is handed out, so the next program that assigns copies it, once. That nobody holds it any
# more would not show that the buffer is free: `jax.device_put` gives it to arrays that do not hold
# the leaf, and would die with it, whether the leaf is the array itself or an alias of it.
def _flatten(variable: Variable) -> tuple[tuple[Any, ...], Any]:
    if _pass.found is None:
        return (variable.value,), _Whose(variable)
    given = given_of(variable)
    _pass.found.append(given)
    return (), given


def _flatten_with_keys(variable: Variable) -> tuple[tuple[tuple[Any, Any], ...], Any]:
    leaves, origin = _flatten(variable)
    return tuple((jax.tree_util.GetAttrKey("value"), leaf) for leaf in leaves), origin


def _unflatten(origin: Any, children: Iterable[Any]) -> Any:
    if type(origin) is Given:
        return _unflatten_given(origin, ())
    (value,) = children
    if _jax.is_tracer(value):
        trace = _jax.trace_of(value)
        if isinstance(trace, _jax.StagingTrace):
            known = _unflattened.trace
            if known is None or known() is not trace:
                _unflattened.trace, _unflattened.values = weakref.ref(trace), {}
            _unflattened.values[id(value)] = weakref.ref(value), origin
    return value


def _flatten_given(given: Given) -> tuple[tuple[()], Given]:
    if _pass.found is not None:
        _pass.found.append(given)
    return (), given


def _unflatten_given(given: Given, _: Iterable[Any]) -> Any:
    return given.variable if _pass.takes else given


jax.tree_util.register_pytree_with_keys(Variable, _flatten_with_keys, _unflatten, _flatten)
jax.tree_util.register_pytree_node(Given, _flatten_given, _unflatten_given)


class Mirror:
    """Stands for an object of a class of the user's in which there is what is no array.

    What stands for that (`Static`, `Given`, `Held`) is in no object of the class itself, which may
    check what it is made of. To JAX a mirror is the same node; `with_variables` makes the object.
    """

    __slots__ = ("children", "keys", "node")

    def __init__(self, children: Sequence[Any], node: Any, keys: tuple[Any, ...]):
        self.children = children
        self.node = node  # its class, and what it is besides its children, as JAX has them
        self.keys = keys


def _unflatten_mirror(of: tuple[Any, tuple[Any, ...]], children: Iterable[Any]) -> Any:
    node, keys = of
    children = tuple(children)
    return node_of(node, children) if _pass.takes else Mirror(children, node, keys)


def node_of(node: Any, children: Sequence[Any]) -> Any:
    """The object of a node, as JAX has that, with these children."""
    leaf = jax.tree.structure(0)
    structure = jax.tree_util.PyTreeDef.from_node_data_and_children(
        jax.tree_util.default_registry, node, [leaf] * len(children)
    )
    return jax.tree.unflatten(structure, children)


jax.tree_util.register_pytree_with_keys(
    Mirror,
    lambda mirror: (
        tuple(zip(mirror.keys, mirror.children, strict=True)),
        (mirror.node, mirror.keys),
    ),
    _unflatten_mirror,
    lambda mirror: (mirror.children, (mirror.node, mirror.keys)),
)

_CONTAINERS = frozenset({tuple, list, dict, OrderedDict, defaultdict, Mirror})


def with_leaves(tree: T, structure: Any, leaves: Iterator[Any]) -> T:
    """A tree with other leaves, and `Given` for its Variables; mirrors where these are in objects
    of classes of the user's."""
    if structure.num_nodes == structure.num_leaves == 1:
        return next(leaves)  # type: ignore[no-any-return]
    if isinstance(tree, Variable):
        return given_of(tree)  # type: ignore[return-value]
    nodes, one_level = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda n: n is not tree)
    if not nodes:
        return tree
    parts = zip(nodes, structure.children(), strict=True)
    children = [with_leaves(child, inner, leaves) for (_, child), inner in parts]
    if all(new is old for new, (_, old) in zip(children, nodes, strict=True)):
        return tree
    if type(tree) in _CONTAINERS or isinstance(tree, Arguments):
        new: T = jax.tree.unflatten(one_level, children)
        return new
    keys = tuple(key for (key,), _ in nodes)
    return Mirror(children, structure.node_data(), keys)  # type: ignore[return-value]


class Arguments(NamedTuple):
    """The arguments of a call, of which messages say where what is."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Unflattened(threading.local):
    """The traced values that were put in the places of Variables, in the trace begun last."""

    trace: Any = None  # weakly

    def __init__(self) -> None:
        self.values: dict[int, tuple[Any, _Whose]] = {}  # by identity, weakly


_unflattened = _Unflattened()


def _whose(value: object) -> Variable | None:
    """The Variable that was in the place of a value, among the arguments of the function that JAX
    has begun to trace; None if there was none."""
    ref, origin = _unflattened.values.get(id(value), (None, None))
    return origin.variable() if ref is not None and origin is not None and ref() is value else None


# --------------------------------------------------------------------------- arguments of a call


Fixed = Given | Structure  # what in arguments a program is made for


def given(arguments: T, *, statics: bool = True) -> tuple[T, tuple[Fixed, ...]]:
    """Arguments with Variables, and what is no array, as parts of their structure (the same object
    if there are none); the structure of their modules, and those Variables in order.

    `statics`: whether what is no array is looked for, and modules are.
    """
    leaves, tree, found = flattened(arguments, is_whole() if statics else None)
    return _given(arguments, leaves, tree, found, statics)


def given_before(arguments: T, *, statics: bool = True) -> tuple[T, tuple[Fixed, ...]]:
    """Arguments as JAX hands them to the function that it traces; what was a Variable when the
    function was called is one again, as in `given`."""
    leaves, tree, found = flattened(arguments, is_whole() if statics else None)
    if _unflattened.values:
        for i, leaf in enumerate(leaves):
            variable = _whose(leaf)
            if variable is not None:
                leaves[i] = given_of(variable)
                found.append(leaves[i])
    return _given(arguments, leaves, tree, found, statics)


def _given(
    arguments: T, leaves: list[Any], tree: Any, found: list[Given], statics: bool
) -> tuple[T, tuple[Fixed, ...]]:
    structures: tuple[Structure, ...] = ()
    is_changed = bool(found)
    if statics and not are_arrays(leaves):
        has_modules, has_statics = hold(leaves), fix(leaves, tree)
        is_changed = is_changed or has_modules or has_statics
        structures = structures_in(leaves)
    if is_changed:
        arguments = with_leaves(arguments, tree, iter(leaves))
    return arguments, (*structures, *found)


def held(arguments: T, *, statics: bool = True) -> tuple[T, tuple[Structure, ...]]:
    """As `given`, of modules alone."""
    if not statics:
        return arguments, ()
    leaves, tree = jax.tree.flatten(arguments, is_leaf=is_whole_or_variable)
    if not hold(leaves):
        return arguments, ()
    return with_leaves(arguments, tree, iter(leaves)), structures_in(leaves)


def is_whole_or_variable(node: object) -> bool:
    """For ``is_leaf=``: whether a node is a Variable, or a whole module; see `modules.is_whole`."""
    is_leaf = is_whole()
    return is_variable(node) or (is_leaf is not None and is_leaf(node))


def taken(arguments: T) -> T:
    """Arguments with the Variables themselves, for the user's function, and with the modules, where
    it is the caller's arguments."""
    leaves, tree, found = flattened(arguments, is_whole())
    modules = [
        (i, leaf.module)
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Held) and leaf.module is not None
    ]
    for i, module in modules:
        leaves[i] = module
    return with_variables(tree, leaves) if found or modules else arguments


def with_variables(tree: Any, leaves: Iterable[Any]) -> Any:
    """Unflattened, with the Variables that are parts of the structure in their places."""
    _pass.takes = True
    try:
        return jax.tree.unflatten(tree, leaves)
    finally:
        _pass.takes = False


def flattened(
    arguments: Any, is_leaf: Callable[[object], bool] | None = None
) -> tuple[list[Any], Any, list[Given]]:
    """The leaves and the structure, and the Variables that are parts of it."""
    found: list[Given] = []
    _pass.found = found
    try:
        leaves, tree = jax.tree.flatten(arguments, is_leaf=is_leaf)
    finally:
        _pass.found = None
    return leaves, tree, found


# ------------------------------------------------------------------------------------------ values


def without_variables(tree: T) -> T:
    """The tree with the value that each Variable in it has now in its place; the tree itself where
    there is none.

    JAX would read them when it flattens the tree, after what listens to a function has stopped.
    """
    if any(isinstance(leaf, Variable) for leaf in jax.tree.leaves(tree, is_leaf=is_variable)):
        tree = values_of(tree)
    return tree


def as_variables(tree: T, name: str = "") -> T:
    """The same tree with a `Variable` in the place of each array, named by its path.

    So the parameters of a layer, those of another library's too, become Variables that tapes watch
    by themselves, traced functions assign, and messages name: ``params.dense.kernel``. Arrays of
    integers are not trainable, and what is no array stays as it is.

    To JAX's own functions of several trees a tree with Variables is another structure than that of
    its gradients, so that `optax.apply_updates` and the like want its values: `values_of` before,
    `assign_values` after.

    Args:
      tree: a tree of arrays.
      name: what the names of the Variables begin with.

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
        Variable(leaf, bool(_jax.has_gradient(jnp.asarray(leaf))), _variable_name(name, path))
        if isinstance(leaf, jax.Array | np.ndarray)
        else leaf
        for path, leaf in nodes
    ]
    new: T = jax.tree.unflatten(structure, leaves)
    return new


def _variable_name(name: str, path: Any) -> str | None:
    return Leaf(path_name(path), None).within(name).name or None


def values_of(tree: Any) -> Any:
    """The same tree with the value of each Variable in its place.

    >>> values_of({"w": Variable([1.0, 2.0]), "step": 3})
    {'step': 3, 'w': Array([1., 2.], dtype=float32)}
    """
    return jax.tree.map(
        lambda x: x.value if isinstance(x, Variable) else x, tree, is_leaf=is_variable
    )


def assign_values(tree: Any, values: Any) -> None:
    """Assigns to each Variable of a tree what stands in its place in another tree.

    Other leaves of `tree` stay as they are. Nothing is assigned if one of the values does not fit.

    Raises:
      ValueError: the trees differ, or a shape.
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
