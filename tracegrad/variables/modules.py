"""Modules of `flax.nnx` among arguments: arrays to JAX, modules again to the function.

To JAX a module is a tree of arrays, of which a function gets a copy, and what it assigns in that
copy would be lost. So a call hands on the arrays of its modules, each once, and what there is
besides (classes, attributes, which references are to the same object) as a part of the arguments'
structure (`Structure`). Where the function is traced, modules of that structure are made of traced
arrays (see `inside`), and what it assigns in those is put into the modules of each call
(`Modules.assign`).

flax is not imported here: where it is not imported already, nobody has a module of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from tracegrad._jax.caches import Cache
from tracegrad.variables.nnx_objects import (
    described,
    is_kind_of_module,
    nnx,
    path_text,
    refuse_hijax,
    static_attributes,
)
from tracegrad.variables.variable import Variable


class Modules(NamedTuple):
    """The modules of a call.

    Attributes:
      roots: those that are arguments, or in trees of arguments.
      objects: all objects in them, in the order of `read`.
    """

    structure: Structure
    roots: list[Any]
    objects: list[Any]

    def assign(self, updates: Sequence[int], values: Sequence[Any]) -> None:
        """Gives new values to some of their arrays."""
        for i, value in zip(updates, values, strict=True):
            place = self.structure.places[i]
            if place.owner is None:
                state = value
                for key in reversed(place.path):
                    state = {key: state}
                for root, changed in state.items():
                    nnx().update(self.roots[root], changed)
                continue
            variable, whole = self.objects[place.owner], value
            if not place.is_whole:
                leaves, tree = jax.tree.flatten(variable.get_raw_value())
                leaves[place.leaf] = value
                whole = jax.tree.unflatten(tree, leaves)
            variable.set_raw_value(whole)

    def set(self, settings: Sequence[Setting]) -> None:
        """Gives new values to some of their attributes that are no data."""
        for owner, name, value in settings:
            setattr(self.objects[owner], name, value.leaf)


class Setting(NamedTuple):
    """An attribute of a module that is no data, with the value that a function gives it."""

    owner: int  # of the objects of a reading
    name: str
    value: Any  # a `Static`


class Held:
    """A module or nnx.Variable among the arguments of a call: a node of their tree.

    Attributes:
      arrays: those of it that are in none of the modules before it: the children.
      structure: of all modules of the call.
      index: which of them it is.
      of: all modules of the call; None where JAX has made the node anew, of other arrays.
    """

    __slots__ = ("arrays", "index", "of", "structure")

    def __init__(
        self, arrays: Sequence[Any], structure: Structure, index: int, of: Modules | None = None
    ):
        self.arrays = arrays
        self.structure = structure
        self.index = index
        self.of = of

    @property
    def module(self) -> Any:
        """The caller's module, if it is known."""
        return None if self.of is None else self.of.roots[self.index]


class PathKey:
    """Where in an object an array is, as one key of its path: ``.blocks[0].kernel``."""

    __slots__ = ("text",)

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PathKey) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def _flatten(held: Held) -> tuple[Sequence[Any], tuple[Structure, int]]:
    return held.arrays, (held.structure, held.index)


def _flatten_with_keys(held: Held) -> tuple[list[tuple[PathKey, Any]], tuple[Structure, int]]:
    (arrays, of), start = _flatten(held), held.structure.starts[held.index]
    places = held.structure.places[start : start + len(arrays)]
    return [(PathKey(p.text), array) for p, array in zip(places, arrays, strict=True)], of


def _unflatten(of: tuple[Structure, int], arrays: Iterable[Any]) -> Held:
    return Held(tuple(arrays), *of)


jax.tree_util.register_pytree_with_keys(Held, _flatten_with_keys, _unflatten, _flatten)


def is_held_or_variable(node: object) -> bool:
    """For ``is_leaf=``: whether it stands for a module, or is a Variable, which is not read."""
    return type(node) is Held or isinstance(node, Variable)


def is_whole() -> Callable[[object], bool] | None:
    """For ``is_leaf=``: whether a node is a module, an nnx.Variable, what stands for such a thing,
    or an nnx.State; None where flax is not imported, so that trees are searched for none."""
    flax = nnx()
    if flax is None:
        return None
    is_of_nnx, state = is_kind_of_module, flax.State

    def is_leaf(node: object) -> bool:
        kind = type(node)
        return kind is Held or is_of_nnx(kind) or isinstance(node, state)

    return is_leaf


# ---------------------------------------------------------------------------------- taking apart


class Reading(NamedTuple):
    """What there is in some modules.

    Attributes:
      key: the same for modules of one structure.
      arrays: of all, each once.
      objects: the modules and nnx.Variables in them, each once.
    """

    key: Any
    arrays: list[Any]
    objects: list[Any]
    has_references: bool = True  # to objects that are somewhere else in them too
    is_in_flax_order: bool = False  # else the arrays are in that of JAX


def read(modules: Sequence[Any]) -> Reading:
    """Takes modules apart, as each call of a function does; so in one pass of JAX over them."""
    of_nnx, places = is_kind_of_module, {}
    objects: list[Any] = []

    def stop(node: Any) -> bool:
        if not of_nnx(type(node)):
            return False
        identity = id(node)  # of what `objects` keeps alive
        if identity in places:
            return True  # met before, and perhaps inside of itself
        places[identity] = len(objects)
        objects.append(node)
        return False

    leaves, tree = jax.tree.flatten(list(modules), is_leaf=stop)
    again = [i for i, leaf in enumerate(leaves) if of_nnx(type(leaf))]
    if not again:
        return Reading((tree, ()), leaves, objects, has_references=False)
    # A class may say that it is no tree to JAX: then its first occurrence is a leaf too.
    if any(_is_opaque(leaves[i]) for i in again):
        return _read_opaque(modules)
    references = tuple((i, places[id(leaves[i])]) for i in again)
    arrays = [leaf for leaf in leaves if not of_nnx(type(leaf))]
    return Reading((tree, references), arrays, objects)


def _is_opaque(node: Any) -> bool:
    return bool(jax.tree_util.all_leaves([node]))


def _read_opaque(modules: Sequence[Any]) -> Reading:
    """The same by flax's own way, which is slower by an order of magnitude."""
    flax = nnx()
    definition, state = flax.flatten(list(modules), graph=True)
    arrays: list[Any] = []
    trees = []
    for leaf in state.leaves:
        value = leaf.get_raw_value() if isinstance(leaf, flax.Variable) else leaf
        of_value, tree = jax.tree.flatten(value)
        arrays += of_value
        trees.append(tree)
    nodes = (node for _, node in flax.iter_graph(list(modules), graph=True))
    objects = [node for node in nodes if is_kind_of_module(type(node))]
    return Reading((definition, tuple(trees)), arrays, objects, is_in_flax_order=True)


def _starts_of_leaves(modules: Sequence[Any]) -> dict[Any, int]:
    """Which of the arrays of a `read` is the first in each nnx.Variable (by identity), and which
    stands at each path: flax takes the fields of a NamedTuple in the order of the alphabet."""
    flax, seen = nnx(), set[int]()

    def stop(node: Any) -> bool:
        if not is_kind_of_module(type(node)):
            return False
        if id(node) in seen:
            return True
        seen.add(id(node))
        return isinstance(node, flax.Variable)

    starts: dict[Any, int] = {}
    count = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(list(modules), is_leaf=stop):
        if isinstance(leaf, flax.Variable):
            if id(leaf) not in starts:
                starts[id(leaf)] = count
                count += len(jax.tree.leaves(leaf.get_raw_value()))
        elif not is_kind_of_module(type(leaf)):
            starts[tuple(map(_flax_key, path))] = count
            count += 1
    return starts


def _flax_key(key: Any) -> Any:
    names = ("name", "key", "idx")
    return next((getattr(key, name) for name in names if hasattr(key, name)), key)


class _Place(NamedTuple):
    """Where an array is: in the value of the nnx.Variable `owner` (of the objects of a reading) as
    leaf `leaf`, else (None) an attribute at `path`, from the list of the modules."""

    owner: int | None
    leaf: int
    is_whole: bool
    path: tuple[Any, ...]
    text: str


class Structure:
    """What modules of a call are besides their arrays. There is one of each: see `hold`.

    Attributes:
      starts: which of the arrays is the first of each module.
      places: of each array.
    """

    def __init__(self, modules: Sequence[Any], reading: Reading):
        flax = nnx()
        self._definition, state = flax.flatten(list(modules), graph=True)
        numbers = {id(node): i for i, node in enumerate(reading.objects)}
        starts = {} if reading.is_in_flax_order else _starts_of_leaves(modules)
        places: dict[int, _Place] = {}
        self._leaves: list[tuple[Any, int]] = []  # of flax: the tree of its value, its first array
        counts = [0] * len(modules)
        for path, leaf in zip(state.paths, state.leaves, strict=True):
            is_variable = isinstance(leaf, flax.Variable)
            value = leaf.get_raw_value() if is_variable else leaf
            inner, tree = jax.tree_util.tree_flatten_with_path(value)
            start = starts.get(id(leaf) if is_variable else tuple(path), len(places))
            self._leaves.append((tree, start))
            counts[path[0]] += len(inner)
            for i, (key, array) in enumerate(inner):
                at = start + i
                if at >= len(reading.arrays) or reading.arrays[at] is not array:
                    refuse_hijax(leaf)
                    name = type(modules[path[0]]).__name__
                    raise TypeError(
                        f"JAX and flax disagree about what is in {name}: {path_text(path[1:])} is "
                        "not where it should be. Give the state of it (nnx.split), and have the "
                        "function return the new one"
                    )
                text = path_text(path[1:]) + jax.tree_util.keystr(key)
                owner = numbers[id(leaf)] if is_variable else None
                is_all = len(inner) == 1 and not key
                places[at] = _Place(owner, i, is_all, path, text)
        self.places = [places[i] for i in sorted(places)]
        self.starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        # Attributes that can change in place would be equal to themselves, changed or not.
        self._changeable = [
            (i, name, copy.deepcopy(value))
            for i, node in enumerate(reading.objects)
            for name, value in static_attributes(node).items()
            if isinstance(value, (list, dict, set, bytearray))
        ]

    def is_of(self, objects: Sequence[Any]) -> bool:
        """Whether attributes that can change in place are as they were."""
        return all(vars(objects[i]).get(name) == old for i, name, old in self._changeable)

    def build(self, arrays: Sequence[Any]) -> list[Any]:
        """Modules of this structure with other arrays."""
        leaves = [
            jax.tree.unflatten(tree, arrays[first : first + tree.num_leaves])
            for tree, first in self._leaves
        ]
        modules: list[Any] = nnx().unflatten(self._definition, leaves)
        return modules

    def describe(self, names: Sequence[str]) -> dict[str, str]:
        """What it is made of, by path: for messages."""
        return described(self.build([...] * len(self.places)), names)

    def __repr__(self) -> str:
        return "<the structure of modules>"


# One of each: JAX compares what it has compiled for with it at every call, and has nothing to look
# at if it is the same object.
_structures: Cache[Any, Structure] = Cache(256)


def structures_in(leaves: Sequence[Any]) -> tuple[Structure, ...]:
    """The structure of the modules of a call, if it has any."""
    return next(((leaf.structure,) for leaf in leaves if type(leaf) is Held), ())


def structure_of(modules: Sequence[Any], reading: Reading) -> Structure:
    """The structure of modules that were read."""
    structure = _structures.get(reading.key)
    if structure is None:
        structure = _structures.put(reading.key, Structure(modules, reading))
    elif not structure.is_of(reading.objects):
        structure = _structures[reading.key] = Structure(modules, reading)
    return structure


def hold(leaves: list[Any]) -> bool:
    """Puts `Held` in the places of modules; whether there are any."""
    places = [i for i, leaf in enumerate(leaves) if is_kind_of_module(type(leaf))]
    if not places:
        return False
    modules = [leaves[i] for i in places]
    reading = read(modules)
    structure = structure_of(modules, reading)
    starts, of = structure.starts, Modules(structure, modules, reading.objects)
    for index, i in enumerate(places):
        arrays = reading.arrays[starts[index] : starts[index + 1]]
        leaves[i] = Held(arrays, structure, index, of)
    return True


def held_arrays(arguments: Any) -> list[Any]:
    """The arrays of modules."""
    leaves = jax.tree.leaves(arguments, is_leaf=is_held_or_variable)
    return [array for leaf in leaves if type(leaf) is Held for array in leaf.arrays]


def held_leaves(arguments: Any) -> list[tuple[int, str]]:
    """Which of the leaves of arguments are those, and where each is: ``['student'].kernel``."""
    leaves = jax.tree_util.tree_leaves_with_path(arguments, is_leaf=Variable.__instancecheck__)
    return [
        (i, jax.tree_util.keystr(path))
        for i, (path, _) in enumerate(leaves)
        if path and type(path[-1]) is PathKey
    ]


def modules_in(arguments: Any) -> Modules | None:
    """The modules of a call, by its arguments; None if there are none, or they are not known."""
    leaves = jax.tree.leaves(arguments, is_leaf=is_held_or_variable)
    return next((leaf.of for leaf in leaves if type(leaf) is Held), None)
