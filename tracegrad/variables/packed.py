"""Arguments taken apart: the arrays of each, and its structure.

`jax.jit` takes its arguments apart at every call. Models answer slowly: each of their classes does
it in Python. And what is no array in them it refuses. So each argument is taken apart here, once,
and handed on as `Packed`: a node of its arrays, whose structure has all the rest, as `Part`s (what
is no array, Variables, objects of flax.nnx that are met again). It is put together again where the
function is traced. No class of the user's is ever made of anything but what the user has put there.
"""

from __future__ import annotations

import copy
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import jax
import numpy as np

from tracegrad.variables.leaves import leaves_with_paths
from tracegrad.variables.modules import (
    Again,
    Root,
    Survey,
    mark_roots,
    objects_in,
    with_modules,
    with_objects,
)
from tracegrad.variables.nnx_objects import is_kind_of_module, is_module, nnx, static_attributes
from tracegrad.variables.paths import PathKey, path_name
from tracegrad.variables.statics import (
    Given,
    Part,
    Static,
    fix,
    has_nodes,
    is_kind_of_array,
    settings,
    structure_with,
)
from tracegrad.variables.trees import flattened
from tracegrad.variables.variable import Variable

T = TypeVar("T")

_KEPT = 256  # layouts of a function, and structures of a layout
_IMMUTABLE = frozenset({str, bytes, type, np.dtype, Again})


class Packed:
    """The arrays of one argument, or of a result, and its structure."""

    __slots__ = ("arrays", "structure")

    def __init__(self, arrays: Sequence[Any], structure: Any):
        self.arrays = arrays
        self.structure = structure

    def argument(self) -> Any:
        """The argument as it was; objects of flax.nnx that are met again are still `Again`, and
        those of classes that are no pytrees `Root`."""
        return jax.tree.unflatten(self.structure, self.arrays)

    def of_arrays(self, each: Iterable[tuple[T, Any]]) -> list[T]:
        """Of something for each leaf of the argument, as pairs with the leaves in order, what there
        is for the arrays."""
        arrays, found = iter(self.arrays), []
        array = next(arrays, None)
        for of_leaf, leaf in each:
            if leaf is array:
                found.append(of_leaf)
                array = next(arrays, None)
        return found

    @property
    def has_parts(self) -> bool:
        """Whether there is anything in it that is no array."""
        return has_nodes(self.structure, (Static, Variable, Again, Root))


class PackedStatic(Packed):
    """A static argument with Variables in it."""

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
    paths = packed.of_arrays(leaves_with_paths(packed.argument()))
    keys = [PathKey(path_name(path)) for path in paths]
    return list(zip(keys, packed.arrays, strict=True)), packed.structure


jax.tree_util.register_pytree_with_keys(
    Packed,
    _flatten_with_paths,
    lambda structure, arrays: Packed(list(arrays), structure),
    operator.attrgetter("arrays", "structure"),
)


class NoTree(Exception):
    """A module of flax.nnx is of a class that is no pytree: see `packed_by_flax`."""


class Version:
    """In a structure: what is below it has attributes of which there are several versions."""


jax.tree_util.register_pytree_node(
    Version, lambda _: ((), None), lambda _, children: next(iter(children))
)


class Packing:
    """Packs the arguments of one function, and remembers what they are made of.

    Args:
      names: what the function calls its positional arguments, for messages.
      rest: what it calls all further ones.
    """

    def __init__(self, names: Sequence[str] = (), rest: str = "args") -> None:
        self._names = names
        self._rest = rest
        self._layouts: dict[Any, _Layout] = {}

    def __call__(
        self, argument: Any, where: str | int, found: list[Given], survey: Survey | None = None
    ) -> Any:
        """The argument packed, or itself, if it is an array.

        Args:
          where: the name or the place of the argument, for messages.
          found: to which its Variables are added.
          survey: of the objects of flax.nnx in the call; None: nobody looks for them.

        Raises NoTree.
        """
        kind = type(argument)
        if is_kind_of_array(kind) or kind is Packed:
            return argument
        if survey is None:
            before, (leaves, tree) = 0, flattened(argument, found)
        else:
            before, (leaves, tree) = len(survey.objects), survey.flatten(argument, found)
        kinds = tuple(map(type, leaves))
        try:
            layout = self._layouts.get((tree, kinds))
        except Exception:  # something in it has no equality: jit says what
            layout = _Layout(kinds, tree)
        if layout is None:
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            layout = self._layouts[tree, kinds] = _Layout(kinds, tree)
            if survey is not None:
                layout.note_changeable(survey.objects[before:])
        if not layout.others and not layout.changeable:
            return Packed(leaves, layout.tree)
        if layout.is_opaque and survey is not None:
            raise NoTree
        key = tuple([id(leaves[i]) for i in layout.others])
        known = layout.known.get(key)
        structure, is_array = known or layout.find(key, leaves, tree, self.name_of(where))
        if layout.is_leaf and all(is_array):
            return argument
        if layout.changeable and survey is not None:
            structure = layout.version_of(structure, survey.objects[before:])
        return Packed(list(itertools.compress(leaves, is_array)), structure)

    def name_of(self, where: str | int) -> str:
        """What an argument is called in messages."""
        if isinstance(where, str):
            return f"the argument {where}"
        further = where - len(self._names)
        return f"the argument {self._names[where] if further < 0 else f'{self._rest}.{further}'}"


class _Layout:
    """Arguments of one structure, as JAX sees it, with leaves of the same types.

    Attributes:
      tree: the structure; one object for all of them, so that nothing has to be compared.
      is_leaf: whether the argument itself is the leaf.
      others: the indices of leaves that may be no arrays.
      is_opaque: whether some of them are modules of flax.nnx of a class that is no pytree.
      known: the structure, and which leaves are arrays, by the identity of these objects.
      changeable: attributes of objects of flax.nnx that can change in place, by the place of the
        object and by name. They are equal to themselves, changed or not.
    """

    def __init__(self, kinds: Sequence[type], tree: Any):
        self.tree = tree
        self.is_leaf = tree.num_nodes == tree.num_leaves == 1
        numbers = settings(kinds, tree)
        self.others = [
            i for i, kind in enumerate(kinds) if not is_kind_of_array(kind) or i in numbers
        ]
        self.is_opaque = any(is_kind_of_module(kinds[i]) for i in self.others)
        self.known: dict[tuple[int, ...], tuple[Any, list[bool]]] = {}
        # Then the same objects make the same structure.
        others: list[Any] = [kinds[i] for i in self.others if i not in numbers]
        self._never_changes = all(
            kind.__eq__ is object.__eq__ or kind in _IMMUTABLE for kind in others
        )
        self._refs: list[weakref.ref[Any]] = []
        self.changeable: list[tuple[int, str]] = []
        self._versions: list[list[Any]] = []

    def note_changeable(self, objects: Sequence[Any]) -> None:
        """Looks for attributes that can change in place."""
        self.changeable = [
            (place, name)
            for place, node in enumerate(objects)
            for name, value in static_attributes(node).items()
            if isinstance(value, (list, dict, set, bytearray))
        ]

    def version_of(self, structure: Any, objects: Sequence[Any]) -> Any:
        """The structure with what these attributes are now."""
        values = [vars(objects[place]).get(name) for place, name in self.changeable]
        if values not in self._versions:
            self._versions.append(copy.deepcopy(values))
        about = Version, self._versions.index(values)
        return jax.tree_util.PyTreeDef.from_node_data_and_children(
            jax.tree_util.default_registry, about, [structure]
        )

    def find(
        self, key: tuple[int, ...], leaves: list[Any], tree: Any, name: str
    ) -> tuple[Any, list[bool]]:
        fixed = list(leaves)
        fix(fixed, tree, name)
        is_array = [not isinstance(leaf, Part) for leaf in fixed]
        structure = tree if all(is_array) else structure_with(tree, fixed)
        if self._never_changes and not any(is_array[i] for i in self.others):
            if len(self.known) >= _KEPT:
                self.known.clear()
                self._refs.clear()
            known = self.known
            # Whenever one of them goes, the entry does, before another has its identity. What
            # cannot be held weakly, the structure holds.
            self._refs = [ref for ref in self._refs if ref() is not None]
            for i in self.others:
                with suppress(TypeError):
                    self._refs.append(weakref.ref(leaves[i], lambda _: known.pop(key, None)))
            known[key] = structure, is_array
        return structure, is_array


def packed_by_flax(
    arguments: Mapping[str | int, Any],
    found: list[Given],
    name_of: Callable[[str | int], str],
) -> tuple[dict[Any, Any], list[Any]]:
    """Arguments packed where some module in them is of a class that is no pytree; and the objects
    of flax.nnx in them."""
    trees = {where: flattened(tree, found, is_module) for where, tree in arguments.items()}
    objects = objects_in([leaves for leaves, _ in trees.values()])
    mark_roots([leaves for leaves, _ in trees.values()], found)
    packed = {}
    for where, (leaves, tree) in trees.items():
        fix(leaves, tree, name_of(where))
        packed[where] = Packed(jax.tree.leaves(leaves), structure_with(tree, leaves))
    return packed, objects


def unpacked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """The arguments of a call as the caller wrote them, but for what JAX has put in the places of
    arrays."""
    arguments = (
        tuple([arg.argument() if isinstance(arg, Packed) else arg for arg in args]),
        {k: arg.argument() if isinstance(arg, Packed) else arg for k, arg in kwargs.items()},
    )
    if nnx() is not None:
        packed = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Packed)]
        if any(has_nodes(each.structure, (Root,)) for each in packed):
            arguments = with_modules(arguments)
        if any(has_nodes(each.structure, (Again,)) for each in packed):
            arguments = with_objects(arguments)
    return arguments
