"""Modules of `flax.nnx` among arguments: arrays to JAX, modules again to the function.

To JAX a module is a tree of arrays, of which a function gets a copy, and what it assigns in that
copy would be lost. So a call hands on the arrays of its modules, each once, and what there is
besides (classes, attributes, which references are to the same object) as a part of the arguments'
structure (`Structure`). Where the function is traced, modules of that structure are made of traced
arrays (`Inside`); what has another value in them when the function is over is an output of its
program, and is put into the modules of each call (`assign`).

flax is not imported here: where it is not imported already, nobody has a module of it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from tracegrad._jax.caches import Cache, cached
from tracegrad.variables.variable import Variable

# What nnx writes into every module, for itself.
_OF_NNX = "_pytree__"


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
                    _nnx().update(self.roots[root], changed)
                continue
            variable, whole = self.objects[place.owner], value
            if not place.is_whole:
                leaves, tree = jax.tree.flatten(variable.get_raw_value())
                leaves[place.leaf] = value
                whole = jax.tree.unflatten(tree, leaves)
            variable.set_raw_value(whole)


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


class Reference:
    """In a result, one of the objects in the modules of a call: a node without leaves."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


jax.tree_util.register_pytree_node(
    Reference, lambda reference: ((), reference.index), lambda index, _: Reference(index)
)


class _At:
    """Where in a module an array is, as a key of a path: ``.blocks[0].kernel``."""

    __slots__ = ("text",)

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _At) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def _flatten(held: Held) -> tuple[Sequence[Any], tuple[Structure, int]]:
    return held.arrays, (held.structure, held.index)


def _flatten_with_keys(held: Held) -> tuple[list[tuple[_At, Any]], tuple[Structure, int]]:
    (arrays, of), start = _flatten(held), held.structure.starts[held.index]
    places = held.structure.places[start : start + len(arrays)]
    return [(_At(p.text), array) for p, array in zip(places, arrays, strict=True)], of


def _unflatten(of: tuple[Structure, int], arrays: Iterable[Any]) -> Held:
    return Held(tuple(arrays), *of)


jax.tree_util.register_pytree_with_keys(Held, _flatten_with_keys, _unflatten, _flatten)


def is_held(node: object) -> bool:
    """Whether it stands for a module."""
    return type(node) is Held


def is_held_or_variable(node: object) -> bool:
    """For ``is_leaf=``: whether it stands for a module, or is a Variable, which is not read."""
    return type(node) is Held or isinstance(node, Variable)


# ------------------------------------------------------------------------------ what modules are


def _nnx() -> Any:
    """flax.nnx, where it is imported."""
    nnx = sys.modules.get("flax.nnx")
    return nnx if hasattr(nnx, "Variable") and hasattr(nnx, "Pytree") else None


@cached(4096)
def _is_of_nnx(kind: type) -> bool:
    nnx = _nnx()
    return nnx is not None and issubclass(kind, (nnx.Pytree, nnx.Variable))


@cached(4096)
def _is_whole(kind: type) -> bool:
    return kind is Held or _is_of_nnx(kind) or issubclass(kind, _nnx().State)


def is_whole() -> Callable[[object], bool] | None:
    """For ``is_leaf=``: whether a node is a module, an nnx.Variable, what stands for such a thing,
    or an nnx.State; None where flax is not imported, so that trees are searched for none.

    A state alone is a tree like others, of which a function gets a copy, as under `jax.jit`.
    """
    if _nnx() is None:
        return None
    is_whole = _is_whole
    return lambda node: is_whole(type(node))


def is_module(node: object) -> bool:
    """Whether an object is a module or an nnx.Variable."""
    return _is_of_nnx(type(node))


def is_variable_of_nnx(node: object) -> bool:
    """For ``is_leaf=``: whether a node is an nnx.Variable."""
    nnx = _nnx()
    return nnx is not None and isinstance(node, nnx.Variable)


def find(wanted: object, module: Any) -> str | None:
    """The path in a module to an object in it: ``.linear.kernel``; None if it is not there."""
    for path, node in _nnx().iter_graph(module, graph=True):
        if node is wanted:
            return _text(path)
    return None


def is_state(node: object) -> bool:
    """Whether a leaf is an nnx.State."""
    nnx = _nnx()
    return nnx is not None and isinstance(node, nnx.State)


class _Reading(NamedTuple):
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


def read(modules: Sequence[Any]) -> _Reading:
    """Takes modules apart, as each call of a function does; so in one pass of JAX over them."""
    of_nnx, places = _is_of_nnx, {}
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
        return _Reading((tree, ()), leaves, objects, has_references=False)
    # A class may say that it is no tree to JAX: then its first occurrence is a leaf too.
    if any(_is_opaque(leaves[i]) for i in again):
        return _read_opaque(modules)
    references = tuple((i, places[id(leaves[i])]) for i in again)
    arrays = [leaf for leaf in leaves if not of_nnx(type(leaf))]
    return _Reading((tree, references), arrays, objects)


def _is_opaque(node: Any) -> bool:
    return bool(jax.tree_util.all_leaves([node]))


def _read_opaque(modules: Sequence[Any]) -> _Reading:
    """The same by flax's own way, which is slower by an order of magnitude."""
    nnx = _nnx()
    definition, state = nnx.flatten(list(modules), graph=True)
    arrays: list[Any] = []
    trees = []
    for leaf in state.leaves:
        value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
        of_value, tree = jax.tree.flatten(value)
        arrays += of_value
        trees.append(tree)
    nodes = (node for _, node in nnx.iter_graph(list(modules), graph=True))
    return _Reading((definition, tuple(trees)), arrays, [n for n in nodes if _is_of_nnx(type(n))])


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

    def __init__(self, modules: Sequence[Any], reading: _Reading):
        nnx = _nnx()
        self._definition, state = nnx.flatten(list(modules), graph=True)
        numbers = {id(node): i for i, node in enumerate(reading.objects)}
        self.places: list[_Place] = []
        self._values: list[Any] = []  # for each leaf of nnx the tree of its value
        counts = [0] * len(modules)
        arrays = iter(reading.arrays)
        for path, leaf in zip(state.paths, state.leaves, strict=True):
            is_variable = isinstance(leaf, nnx.Variable)
            value = leaf.get_raw_value() if is_variable else leaf
            inner, tree = jax.tree_util.tree_flatten_with_path(value)
            self._values.append(tree)
            counts[path[0]] += len(inner)
            for i, (key, array) in enumerate(inner):
                if next(arrays, None) is not array:
                    name = type(modules[path[0]]).__name__
                    raise TypeError(
                        f"JAX and flax disagree about what is in {name}: {_text(path[1:])} is not "
                        "where it should be. Give the state of it (nnx.split), and have the "
                        "function return the new one"
                    )
                text = _text(path[1:]) + jax.tree_util.keystr(key)
                owner = numbers[id(leaf)] if is_variable else None
                self.places.append(_Place(owner, i, len(inner) == 1 and not key, path, text))
        self.starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        # Attributes that can change in place would be equal to themselves, changed or not.
        self._changeable = [
            (i, name, copy.deepcopy(value))
            for i, node in enumerate(reading.objects)
            for name, value in _static_attributes(node).items()
            if isinstance(value, (list, dict, set, bytearray))
        ]

    def is_of(self, objects: Sequence[Any]) -> bool:
        """Whether attributes that can change in place are as they were."""
        return all(vars(objects[i]).get(name) == old for i, name, old in self._changeable)

    def build(self, arrays: Sequence[Any]) -> list[Any]:
        """Modules of this structure with other arrays."""
        rest = iter(arrays)
        leaves = [
            jax.tree.unflatten(tree, [next(rest) for _ in range(tree.num_leaves)])
            for tree in self._values
        ]
        modules: list[Any] = _nnx().unflatten(self._definition, leaves)
        return modules

    def describe(self, names: Sequence[str]) -> dict[str, str]:
        """What it is made of, by path: for messages."""
        return described(self.build([None] * len(self.places)), names)

    def __repr__(self) -> str:
        return "<the structure of modules>"


_structures: Cache[Any, Structure] = Cache(256)


def structures_in(leaves: Sequence[Any]) -> tuple[Structure, ...]:
    """The structure of the modules of a call, if it has any."""
    return next(((leaf.structure,) for leaf in leaves if type(leaf) is Held), ())


def hold(leaves: list[Any]) -> bool:
    """Puts `Held` in the places of modules; whether there are any."""
    places = [i for i, leaf in enumerate(leaves) if _is_of_nnx(type(leaf))]
    if not places:
        return False
    modules = [leaves[i] for i in places]
    reading = read(modules)
    structure = _structures.get(reading.key)
    if structure is None:
        structure = _structures.put(reading.key, Structure(modules, reading))
    elif not structure.is_of(reading.objects):
        structure = _structures[reading.key] = Structure(modules, reading)
    starts, of = structure.starts, Modules(structure, modules, reading.objects)
    for index, i in enumerate(places):
        arrays = reading.arrays[starts[index] : starts[index + 1]]
        leaves[i] = Held(arrays, structure, index, of)
    return True


# -------------------------------------------------------------------------------- around a call


def array_places(arguments: Any) -> list[int]:
    """Which of the leaves of arguments are arrays of modules."""
    found: list[int] = []
    start = 0
    for leaf in jax.tree.leaves(arguments, is_leaf=is_held_or_variable):
        if type(leaf) is Held:
            found += range(start, start + len(leaf.arrays))
            start += len(leaf.arrays)
        else:
            start += 1
    return found


def put_together(result: Any, modules: Modules | None) -> Any:
    """A result with the modules that stand in it for others; see `Inside.handed_out`.

    `modules`: those of the call.
    """
    leaves, tree = jax.tree.flatten(result, is_leaf=_is_handed_out)
    built: list[Any] | None = None
    for i, leaf in enumerate(leaves):
        if type(leaf) is Reference:
            assert modules is not None, "what is returned was given"
            leaves[i] = modules.objects[leaf.index]
        elif type(leaf) is Held:
            if built is None:
                arrays = [array for one in leaves if type(one) is Held for array in one.arrays]
                built = leaf.structure.build(arrays)
            leaves[i] = built[leaf.index]
    return jax.tree.unflatten(tree, leaves)


def hands_out(structure: Any) -> bool:
    """Whether results of a structure are to be put together."""
    result = jax.tree.unflatten(structure, range(structure.num_leaves))
    return any(map(_is_handed_out, jax.tree.leaves(result, is_leaf=_is_handed_out)))


def _is_handed_out(node: object) -> bool:
    return type(node) is Reference or type(node) is Held


def held_arrays(arguments: Any) -> list[Any]:
    """The arrays of modules."""
    leaves = jax.tree.leaves(arguments, is_leaf=is_held_or_variable)
    return [array for leaf in leaves if is_held(leaf) for array in leaf.arrays]


def held_paths(argument: Any) -> list[str]:
    """Where each of them is in an argument: ``['student'].linear.kernel``."""
    paths = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(argument, is_leaf=is_held_or_variable)[
        0
    ]:
        if is_held(leaf):
            inner, _ = jax.tree_util.tree_flatten_with_path(leaf)
            paths += [jax.tree_util.keystr((*path, *keys)) for keys, _ in inner]
    return paths


def modules_in(arguments: Any) -> Modules | None:
    """The modules of a call, by its arguments; None if there are none, or they are not known."""
    leaves = jax.tree.leaves(arguments, is_leaf=is_held_or_variable)
    return next((leaf.of for leaf in leaves if type(leaf) is Held), None)


# --------------------------------------------------------------------------- inside of a function


class Inside:
    """The modules that a function gets while it is traced.

    Attributes:
      arguments: what it was given, with modules made of traced arrays.
    """

    def __init__(self, arguments: Any):
        leaves, tree = jax.tree.flatten(arguments, is_leaf=is_held_or_variable)
        self._places = [i for i, leaf in enumerate(leaves) if type(leaf) is Held]
        self.arguments = self._held = arguments
        if not self._places:
            return
        held = [leaves[i] for i in self._places]
        self._structure: Structure = held[0].structure
        self._modules = self._structure.build([array for one in held for array in one.arrays])
        self._before = read(self._modules)
        for i, module in zip(self._places, self._modules, strict=True):
            leaves[i] = module
        self.arguments = jax.tree.unflatten(tree, leaves)

    def updates(self, names: Sequence[str]) -> tuple[list[int], list[Any]]:
        """What the function has assigned: which of the arrays of its modules, and the new values.

        `names`: of its arguments, in the order of their leaves; for a message.
        """
        if not self._places:
            return [], []
        before, now = self._before, read(self._modules)
        if now.key != before.key:
            raise TypeError(_structure_changed(self._structure, self._modules, self._names(names)))
        changed = [
            i for i, (a, b) in enumerate(zip(before.arrays, now.arrays, strict=True)) if a is not b
        ]
        return changed, [now.arrays[i] for i in changed]

    def handed_out(self, result: Any) -> Any:
        """A result in which JAX finds arrays alone: what it has of the modules that the function
        was given are references to them, and a new module in which something is met twice, which
        JAX would make two of, is `Held`."""
        is_leaf = is_whole()
        if is_leaf is None:
            return result
        leaves, tree = jax.tree.flatten(
            result, is_leaf=lambda n: is_leaf(n) or isinstance(n, Variable)
        )
        places = [i for i, leaf in enumerate(leaves) if is_module(leaf)]
        if not places:
            return result
        given = self._before.objects if self._places else ()
        numbers = {id(node): i for i, node in enumerate(given)}
        for i in places:
            if id(leaves[i]) in numbers:
                leaves[i] = Reference(numbers[id(leaves[i])])
        new = [leaves[i] for i in places if is_module(leaves[i])]
        reading = read(new)
        if any(id(node) in numbers for node in reading.objects):
            raise TypeError(
                "a traced function returns a new module of flax.nnx that holds a part of one that "
                "it is given. Return the two by themselves, and put them together afterwards"
            )
        if reading.has_references:
            hold(leaves)
        return jax.tree.unflatten(tree, leaves)

    def _names(self, names: Sequence[str]) -> list[str]:
        """Those of the modules: ``models['student']``."""
        args, kwargs = self._held
        arguments = [*args, *(kwargs[name] for name in sorted(kwargs))]
        paths, _ = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=is_held_or_variable)
        return [
            names[path[0].idx] + jax.tree_util.keystr(path[1:])
            for path, leaf in paths
            if is_held(leaf)
        ]


def _structure_changed(structure: Structure, modules: Sequence[Any], names: Sequence[str]) -> str:
    found = differences(structure.describe(names), described(modules, names))
    where, before, now = found[0] if found else (names[0], "another", "changed")
    is_now = f"is {now}, and was {before}" if now != "absent" else "is gone"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        "a traced function changes the structure of a module of flax.nnx that it is given: "
        f"{where} {is_now}{more}. Programs are made for one structure, and give new "
        "values to the arrays in it alone. Change the structure before the call "
        "(model.eval(), a Variable with an initial value), or build the module in the function and "
        "return it"
    )


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Where two descriptions differ, and how: ``("`model.dropout.deterministic`", "False",
    "True")``. Not what is in another thing that differs."""
    paths = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    within = tuple(f"{path}{then}" for path in paths for then in ".[")
    return [
        (f"`{path}`", _short(old.get(path, "absent")), _short(new.get(path, "absent")))
        for path in paths
        if not path.startswith(within)
    ]


def described(modules: Sequence[Any], names: Sequence[str]) -> dict[str, str]:
    """Classes and static attributes of modules, and of what is in them, by path.

    `names`: of the modules.
    """
    nnx = _nnx()
    texts: dict[str, str] = {}
    for path, node in nnx.iter_graph(list(modules), graph=True):
        if not _is_of_nnx(type(node)):
            continue
        where = names[path[0]] + _text(path[1:])
        texts[where] = f"a {type(node).__name__}"
        attributes = _static_attributes(node)
        if isinstance(node, nnx.Variable):
            attributes = node.get_metadata()
            inner = jax.tree.structure(node.get_raw_value(), is_leaf=lambda x: x is None)
            is_array = jax.tree_util.treedef_is_leaf(inner)
            texts[f"{where}.value"] = "an array" if is_array else repr(inner)
        texts.update({f"{where}.{name}": repr(value) for name, value in attributes.items()})
    return texts


def _static_attributes(module: Any) -> dict[str, Any]:
    if isinstance(module, _nnx().Variable):
        return {}
    is_data = _nnx().is_data
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith(_OF_NNX) and not is_data(value) and not _has_data(value)
    }


def _has_data(value: Any) -> bool:
    is_data = _nnx().is_data
    return any(map(is_data, jax.tree.leaves(value, is_leaf=is_data)))


def _text(path: Sequence[Any]) -> str:
    return "".join(f".{key}" if isinstance(key, str) else f"[{key!r}]" for key in path)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
