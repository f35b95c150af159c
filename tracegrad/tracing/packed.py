"""Packs arguments: the arrays of each argument, and a structure that holds everything else; unpacks
arguments and results.

`jax.jit` flattens its arguments at every call. Flattening is slow for models, whose classes flatten
themselves in Python, and JAX refuses leaves that are not arrays. So each argument is flattened
here, once, and passed to `jax.jit` as `Packed`: a node whose children are the arrays. The structure
has a `NonArrayNode` for each leaf that is not an array and for each repeated nnx object, and a
`VariableNode` for each Variable. Inside the trace the argument is unpacked. The user's classes are
only ever unflattened with the kinds of leaves that the user has put into them.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import jax
import numpy as np

from tracegrad.ir.paths import PathKey, path_name
from tracegrad.tracing.leaves import leaves_with_paths
from tracegrad.tracing.modules import (
    RepeatedObject,
    ResultWithModules,
    Update,
    restore_repeated_objects,
)
from tracegrad.tracing.nnx_objects import nnx
from tracegrad.tracing.statics import (
    NonArrayNode,
    Static,
    equinox_settings,
    has_nodes,
    is_kind_of_array,
    replace_by_statics,
    structure_with,
)
from tracegrad.variables.variable import Variable

T = TypeVar("T")

_KEPT = 256  # the most structures of a layout in the cache
_IMMUTABLE = frozenset({str, bytes, type, np.dtype, RepeatedObject})


class Packed:
    """The arrays and the structure of an argument or a result."""

    __slots__ = ("_paths", "arrays", "structure")

    def __init__(self, arrays: Sequence[Any], structure: Any):
        self.arrays = arrays
        self.structure = structure
        self._paths: list[PathKey] | None = None  # to the arrays; a trace needs them several times

    def argument(self) -> Any:
        """Returns the argument; `RepeatedObject`s still stand for nnx objects (see
        `unpack_arguments`)."""
        return jax.tree.unflatten(self.structure, self.arrays)

    def select_of_arrays(self, each: Iterable[tuple[T, Any]]) -> list[T]:
        """Takes a pair (item, leaf) for each leaf of the argument, in order; returns the items of
        the leaves that are arrays."""
        arrays, found = iter(self.arrays), []
        array = next(arrays, None)
        for of_leaf, leaf in each:
            if leaf is array:
                found.append(of_leaf)
                array = next(arrays, None)
        return found

    @property
    def has_non_arrays(self) -> bool:
        return has_non_arrays(self.structure)


def has_non_arrays(structure: Any) -> bool:
    return has_nodes(structure, (Static, Variable, RepeatedObject, ResultWithModules))


def has_nnx_objects(structure: Any) -> bool:
    """Whether a result contains nodes that stand for nnx objects."""
    return nnx() is not None and has_nodes(structure, (RepeatedObject, ResultWithModules))


class PackedStatic(Packed):
    """A static argument that contains Variables."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PackedStatic)
            and self.structure == other.structure
            and self.arrays == other.arrays
        )

    def __hash__(self) -> int:
        return hash((self.structure, *self.arrays))


def _flatten_with_paths(packed: Packed) -> tuple[Iterable[tuple[PathKey, Any]], Any]:
    if packed._paths is None:
        paths = packed.select_of_arrays(leaves_with_paths(packed.argument()))
        packed._paths = [PathKey(path_name(path)) for path in paths]
    return list(zip(packed._paths, packed.arrays, strict=True)), packed.structure


jax.tree_util.register_pytree_with_keys(
    Packed,
    _flatten_with_paths,
    lambda structure, arrays: Packed(list(arrays), structure),
    operator.attrgetter("arrays", "structure"),
)


class Layout:
    """Cached facts about all arguments with one structure of JAX and leaves of the same types.

    Attributes:
      tree: the structure; one object for all arguments, so that JAX compares it by identity.
      is_leaf: whether the argument itself is the leaf.
      others: the indices of the leaves that may not be arrays.
      known: by the ids of the `others`: the packed structure, and which leaves are arrays.
    """

    def __init__(self, kinds: Sequence[type], tree: Any):
        self.tree = tree
        self.is_leaf = tree.num_nodes == tree.num_leaves == 1
        numbers = equinox_settings(kinds, tree)
        self.others = [
            i for i, kind in enumerate(kinds) if not is_kind_of_array(kind) or i in numbers
        ]
        self.known: dict[tuple[int, ...], tuple[Any, list[bool]]] = {}
        # If no leaf can change, the same objects always make the same structure.
        others: list[Any] = [kinds[i] for i in self.others if i not in numbers]
        self._never_changes = all(
            kind.__eq__ is object.__eq__ or kind in _IMMUTABLE for kind in others
        )
        self._refs: list[weakref.ref[Any]] = []

    def find(
        self, key: tuple[int, ...], leaves: list[Any], tree: Any, name: str
    ) -> tuple[Any, list[bool]]:
        """Returns the packed structure, and which leaves are arrays; caches both by `key`, if the
        leaves cannot change."""
        fixed = list(leaves)
        replace_by_statics(fixed, tree, name)
        is_array = [not isinstance(leaf, NonArrayNode) for leaf in fixed]
        structure = tree if all(is_array) else structure_with(tree, fixed)
        if self._never_changes and not any(is_array[i] for i in self.others):
            if len(self.known) >= _KEPT:
                self.known.clear()
                self._refs.clear()
            known = self.known
            # An entry is removed as soon as one of its leaves is gone, before another object can
            # get the id. If a leaf has no weak references, the structure keeps it alive.
            self._refs = [ref for ref in self._refs if ref() is not None]
            for i in self.others:
                with suppress(TypeError):
                    self._refs.append(weakref.ref(leaves[i], lambda _: known.pop(key, None)))
            known[key] = structure, is_array
        return structure, is_array


def unpack_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Returns the arguments as the caller passed them, with JAX's tracers instead of the arrays."""
    arguments: tuple[tuple[Any, ...], Any] = (
        tuple([arg.argument() if isinstance(arg, Packed) else arg for arg in args]),
        {k: arg.argument() if isinstance(arg, Packed) else arg for k, arg in kwargs.items()},
    )
    packed = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Packed)]
    if any(has_nodes(x.structure, (RepeatedObject,)) for x in packed):
        arguments = restore_repeated_objects(arguments)
    return arguments


def finish_result(
    result: Any,
    objects: Sequence[Any],
    updates: Sequence[Update],
    values: Sequence[Any],
    *,
    has_objects: bool,
) -> Any:
    """Returns the caller's result of a call, and assigns the new arrays in the caller's modules.

    Args:
      objects: the nnx objects of the call.
      updates, values: the places of the new arrays, and the arrays.
      has_objects: `has_nnx_objects` of the result's structure.
    """
    for update, value in zip(updates, values, strict=True):
        update.assign(objects, value)
    if not has_objects:
        return result
    if isinstance(result, ResultWithModules):
        return restore_repeated_objects(result).write_back(objects)
    return restore_repeated_objects(result, objects)
