"""The leaves of arguments and results that are not arrays: they become nodes of the structure.

A leaf that is neither an array nor a number (models contain functions, strings, objects) becomes a
node of the argument's structure (`Static`): each such leaf has a program of its own, and the
function gets the leaf itself. Results are treated alike. A number in an `equinox.Module` is a
setting (a rate, a size, a flag), and becomes `Static` too, as in `equinox.filter_jit` and
`filter_grad`: Python cannot branch on a traced array, and optimisers would train it. A Variable
among arguments also becomes a node of the structure (`variables.trees`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import NoneType
from typing import Any, TypeVar

import jax
import numpy as np

from tracegrad._jax.caches import cached, facts_of
from tracegrad.ir.paths import path_name
from tracegrad.tracing.nnx_objects import is_module, refuse_hijax
from tracegrad.variables.trees import is_variable
from tracegrad.variables.variable import Variable

T = TypeVar("T")

# For ``is_leaf=``, if None may stand for an array.
is_none = NoneType.__instancecheck__


class NonArrayNode:
    """The base of nodes that take the place of leaves that are not arrays."""

    __slots__ = ()


class Static(NonArrayNode):
    """A node without leaves, in the place of a leaf that is not an array.

    Unflattening puts the leaf itself back. Two `Static`s are equal if their leaves are equal and of
    one type, or, if the class defines no equality, the same object. A leaf with equality but
    without a hash is refused, as `jax.jit` refuses such static arguments: the leaf is part of the
    key of a program.
    """

    __slots__ = ("__weakref__", "_hash", "_leaf", "_ref", "_text")

    def __init__(self, leaf: Any, *, is_result: bool = False):
        kind: Any = type(leaf)
        self._leaf, self._hash = leaf, object.__hash__(leaf)
        self._ref: Any = None
        self._text = f"<{kind.__name__} that is gone>"
        if kind.__eq__ is not object.__eq__:
            if not is_result:  # the leaves of a result are not part of a program's key
                self._hash = _hash_of(leaf)
        # JAX's caches keep this `Static`, which must not keep an argument alive that equals only
        # itself.
        elif not is_result:
            with suppress(TypeError):
                self._leaf, self._ref = None, weakref.ref(leaf)

    @property
    def leaf(self) -> Any:
        return self._leaf if self._ref is None else self._ref()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or self._hash != other._hash:
            return False
        mine, others = self.leaf, other.leaf
        if mine is others:
            return self._ref is None or mine is not None
        return _is_same(mine, others)

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_known_by_identity(self) -> bool:
        return self._ref is not None or type(self._leaf).__eq__ is object.__eq__  # type: ignore[comparison-overlap]

    def __repr__(self) -> str:
        leaf = self.leaf
        return self._text if leaf is None else repr(leaf)


jax.tree_util.register_pytree_node(
    Static, lambda static: ((), static), lambda static, _: static.leaf
)


def _hash_of(leaf: Any) -> int:
    """Raises TypeError for a leaf without a hash: the hash is part of the keys of programs."""
    try:
        # By the text, since 0.0 == -0.0 and nan != nan.
        value = hash(repr(leaf) if isinstance(leaf, (float, complex)) else leaf)
        if isinstance(leaf, (float, complex)) or leaf == leaf:
            return value
        problem = None
    except Exception as error:
        problem = error
    raise TypeError(
        f"it is {leaf!r} of type {type(leaf).__name__}, which has no hash or no equality. A leaf "
        "that is not an array is static, and must have both. Define both in its class "
        "(`@dataclass(frozen=True)`), or neither; if it holds arrays, register the class with "
        "jax.tree_util.register_dataclass"
    ) from problem


def _is_same(one: Any, other: Any) -> bool:
    """Of one type, too: 1 == 1.0 == True."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    try:
        return bool(one == other)
    except Exception:  # such leaves are equal only to themselves
        return False


def _static(leaf: Any, index: int, structure: Any, *, is_result: bool, where: str) -> Static:
    try:
        if is_module(leaf):
            raise TypeError(
                f"it is a {type(leaf).__name__} of flax.nnx whose class is not a pytree, so that "
                "its changes could not leave the function. Define the class without `pytree=False`"
            )
        if is_result and isinstance(leaf, Iterator):
            raise TypeError(
                f"it is {leaf!r}, an iterator, which would compute after the function is over. "
                "Return a list"
            )
        return Static(leaf, is_result=is_result)
    except TypeError as error:
        raise TypeError(f"{name_of_leaf(structure, index, where)}: {error}") from error.__cause__


def name_of_leaf(structure: Any, index: int, of: str) -> str:
    """``model.layers.0.bias``."""
    places = jax.tree.unflatten(structure, range(structure.num_leaves))
    keys = next(k for k, i in jax.tree_util.tree_leaves_with_path(places) if i == index)
    return path_name(keys, of)


_ARRAYS = (bool, int, float, complex, np.ndarray, jax.ShapeDtypeStruct)


@cached(4096)
def is_kind_of_array(kind: type) -> bool:
    """Whether JAX traces all objects of a type as arrays; true for nearly all leaves."""
    return kind in _ARRAYS or issubclass(kind, (jax.Array, jax.core.Tracer))


def are_arrays(leaves: Sequence[Any]) -> bool:
    """In every tree: a number in a module of equinox is a setting."""
    kinds = set(map(type, leaves))
    return all(map(is_kind_of_array, kinds)) and kinds.isdisjoint(_PLAIN_NUMBERS)


def is_array(leaf: Any) -> bool:
    """Whether JAX traces a leaf of an argument: an array, a number, or a `jax.ShapeDtypeStruct`."""
    if is_kind_of_array(type(leaf)):
        return True
    if isinstance(leaf, type):  # `jnp.float32` has a dtype, and is a setting
        return False
    if (hasattr(leaf, "dtype") and hasattr(leaf, "shape")) or hasattr(leaf, "__jax_array__"):
        return True
    known = facts_of(type(leaf))
    if "is array" not in known:  # cached, because JAX's error prints the whole object
        try:
            jax.typeof(leaf)
        except TypeError:
            known["is array"] = False
        else:
            return True
    return False


def equinox_settings(kinds: Sequence[type], structure: Any) -> frozenset[int]:
    """Returns the indices of the leaves that are numbers in modules of equinox. `kinds`: the types
    of the leaves."""
    numbers = [
        i
        for i, kind in enumerate(kinds)
        if issubclass(kind, _NUMBERS) and not issubclass(kind, np.generic)
    ]
    module = _module_of_equinox()
    if not numbers or module is None:
        return frozenset()
    is_inside = _are_inside_modules(structure, module)
    return frozenset(i for i in numbers if is_inside[i])


_NUMBERS = (int, float, complex)  # and bool
_PLAIN_NUMBERS = frozenset({bool, *_NUMBERS})


def _module_of_equinox() -> type | None:
    """None unless equinox is imported completely."""
    return getattr(sys.modules.get("equinox"), "Module", None)


def is_equinox_module(node: object) -> bool:
    module = _module_of_equinox()
    return module is not None and isinstance(node, module)


def has_equinox_modules(structure: Any) -> bool:
    """Modules without leaves do not count."""
    module = _module_of_equinox()
    return module is not None and any(_are_inside_modules(structure, module))


def _are_inside_modules(structure: Any, module: type) -> list[bool]:
    """Says for each leaf whether it is inside a node of the class `module`."""
    node = structure.node_data()
    if node is not None and issubclass(node[0], module):
        return [True] * structure.num_leaves
    if node is None:
        return [False] * structure.num_leaves
    return [
        inside for child in structure.children() for inside in _are_inside_modules(child, module)
    ]


def are_traced(leaves: Sequence[Any], structure: Any) -> list[bool]:
    traced = [is_array(leaf) for leaf in leaves]
    for i in equinox_settings([type(leaf) for leaf in leaves], structure):
        traced[i] = False
    return traced


def with_statics(result: T) -> T:
    """Replaces the leaves that are not arrays by `Static`; returns the result itself if all leaves
    are arrays."""
    leaves, structure = jax.tree.flatten(result, is_leaf=is_variable)
    if not replace_by_statics(leaves, structure, "result", is_result=True):
        return result
    new: T = jax.tree.unflatten(structure, leaves)
    return new


def replace_by_statics(
    leaves: list[Any], structure: Any, where: str, *, is_result: bool = False
) -> bool:
    """Replaces the leaves that are not arrays by `Static`, in the list. Returns whether it replaced
    any. `where`: the name of the tree in messages."""
    if are_arrays(leaves):
        return False
    fixed = False
    for i, is_traced in enumerate(are_traced(leaves, structure)):
        refuse_hijax(leaves[i])
        if is_traced or isinstance(leaves[i], (Variable, NonArrayNode)):
            continue
        leaves[i] = _static(leaves[i], i, structure, is_result=is_result, where=where)
        fixed = True
    return fixed


def has_nodes(structure: Any, kinds: tuple[type, ...]) -> bool:
    waiting = [structure]
    while waiting:
        structure = waiting.pop()
        node = structure.node_data()
        if node is not None:
            if node[0] in kinds:
                return True
            waiting += structure.children()
    return False


def structure_with(structure: Any, leaves: Sequence[Any]) -> Any:
    """Returns the structure after `leaves` (a `NonArrayNode`, a tree, or None for an unchanged
    leaf) have replaced its leaves. Makes no tree: a class of the user's may check its leaves."""
    if structure.num_nodes == structure.num_leaves == 1:
        return structure if leaves[0] is None else jax.tree.structure(leaves[0])
    if not structure.num_leaves:
        return structure
    children, start = [], 0
    for child in structure.children():
        children.append(structure_with(child, leaves[start : start + child.num_leaves]))
        start += child.num_leaves
    return jax.tree_util.PyTreeDef.from_node_data_and_children(
        jax.tree_util.default_registry, structure.node_data(), children
    )
