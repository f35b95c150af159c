"""Modules of `flax.nnx` among the arguments of a call, flattened as pytrees, each object once.

A program takes the arrays of a module like those of any tree, and the function gets a module made
of traced arrays. Modules differ from other trees in two ways. First, an object can occur twice, in
another argument or inside itself, and must be one object inside the function too: `Again` takes the
place of the second occurrence. Second, the caller sees what the function assigns in a module: the
new values are outputs of the program (`Snapshot.changed`), and the caller's objects get them
(`Update.assign`). If the function changes the structure of a module, the program returns whole
modules, and the caller's objects take over their attributes (`Twins`).

Some classes of modules are not pytrees (``pytree=False``). If a call has such a module, flax
flattens all modules of the call (`Root`): this is slower, and finds shared objects too.

This file does not import flax: if nobody else has imported it, there are no modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from tracegrad.variables.nnx_objects import (
    is_kind_of_module,
    is_kind_of_state,
    is_module,
    nnx,
    set_leaf,
)
from tracegrad.variables.paths import PathKey, path_name
from tracegrad.variables.statics import Given, Part, is_variable, structure_with
from tracegrad.variables.trees import finding, flattened

# -------------------------------------------------------------------- objects that are met again


class Again(Part):
    """A node without leaves, in the place of an object of flax.nnx that occurred before.

    Attributes:
      place: the index of the object in `Survey.objects`.
    """

    __slots__ = ("place",)

    def __init__(self, place: int):
        self.place = place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Again) and self.place == other.place

    def __hash__(self) -> int:
        return hash((Again, self.place))

    def __repr__(self) -> str:
        return f"<object {self.place} again>"


jax.tree_util.register_pytree_node(Again, lambda again: ((), again), lambda again, _: again)

_again: list[Again] = []  # one object for each place, so that layouts find it by identity


def again(place: int) -> Again:
    """Returns the `Again` of a place."""
    while len(_again) <= place:
        _again.append(Again(len(_again)))
    return _again[place]


class Survey:
    """An ``is_leaf=`` for flattening the trees of one call: collects the objects of flax.nnx, and
    makes the second occurrence of an object a leaf.

    It does not collect the nnx.Variables of an nnx.State outside of modules: a function gets a copy
    of a state, as of any tree.

    Attributes:
      objects: the modules and nnx.Variables, each once, in the order of flattening.
    """

    def __init__(self, objects: Iterable[Any] = ()):
        self.objects = list(objects)
        self._meets_again = False
        # By identity; `objects` and the caller keep the objects alive.
        self._places = {id(node): i for i, node in enumerate(self.objects)}
        self._states: set[int] = set()

    def __call__(self, node: Any) -> bool:
        if not is_kind_of_module(type(node)):
            return id(node) in self._states
        if id(node) in self._places:
            self._meets_again = True
            return True
        self._places[id(node)] = len(self.objects)
        self.objects.append(node)
        return False

    def flatten(self, tree: Any, found: list[Given] | None) -> tuple[list[Any], Any]:
        """Returns the leaves of a tree, with `Again` among them, and its structure. Variables are
        added to `found`, as in `trees.flattened`; if `found` is None, Variables are leaves."""
        states: list[Any] = []
        if not is_kind_of_module(type(tree)):
            nodes = jax.tree.leaves(tree, is_leaf=is_whole_or_variable)
            states = [node for node in nodes if is_state(node)]
        self._states = set(map(id, states))
        if found is None:
            leaves, structure = jax.tree.flatten(tree, lambda n: is_variable(n) or self(n))
        else:
            leaves, structure = flattened(tree, found, self)
        if self._meets_again:
            for i, leaf in enumerate(leaves):
                if is_kind_of_module(type(leaf)) and not is_opaque(leaf):
                    leaves[i] = again(self._places[id(leaf)])
        if states:
            structure = structure_with(structure, [x if is_state(x) else None for x in leaves])
            leaves = [
                x for leaf in leaves for x in (jax.tree.leaves(leaf) if is_state(leaf) else [leaf])
            ]
        return leaves, structure


def is_opaque(leaf: Any) -> bool:
    """Whether a leaf of a `Survey` is a module whose class is not a pytree."""
    return is_kind_of_module(type(leaf)) and jax.tree_util.all_leaves([leaf])


def with_objects(tree: Any, objects: Iterable[Any] = ()) -> Any:
    """Returns a tree in which each `Again` is replaced by its object.

    Args:
      objects: the objects that occurred before; the objects in the tree come after them.
    """
    survey = Survey(objects)
    before = len(survey.objects)
    survey.flatten(tree, [])

    def of_part(part: Any) -> Any:
        return _exchanged(part, lambda x: survey.objects[x.place] if _is_again(x) else x)

    for node in survey.objects[before:]:
        for name, value in _attributes(node):
            new = of_part(value)
            if new is not value:
                object.__setattr__(node, name, new)
    return of_part(tree)


def _exchanged(tree: Any, other: Callable[[Any], Any]) -> Any:
    """Returns a tree in which `other` has replaced the objects of flax.nnx and each `Again`; the
    tree itself if nothing was replaced."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_again_or_module)
    others = list(map(other, leaves))
    if all(a is b for a, b in zip(leaves, others, strict=True)):
        return tree
    return jax.tree.unflatten(structure, others)


_is_again = Again.__instancecheck__


def _is_again_or_module(node: object) -> bool:
    return _is_again(node) or is_module_or_variable(node)


def _attributes(node: Any) -> Iterable[tuple[str, Any]]:
    """Returns the attributes of an object of flax.nnx that may hold other objects, by name."""
    if isinstance(node, nnx().Variable):
        return (("_raw_value", node.get_raw_value()),)
    return list(vars(node).items())


# ----------------------------------------------------------------- classes that are no pytrees


class Root(Part):
    """A node in the place of a module that flax has flattened. Its children are the arrays of the
    module that occur in no earlier module.

    Attributes:
      index: the index of the module among the roots of the call.
      definition: flax's graph definition of all roots, and the structures of flax's leaves.
      places: the paths of the arrays, for messages.
    """

    __slots__ = ("arrays", "definition", "index", "places")

    def __init__(self, arrays: Sequence[Any], index: int, definition: Any, places: Sequence[str]):
        self.arrays = arrays
        self.index = index
        self.definition = definition
        self.places = places


def _flatten_root(root: Root) -> tuple[Sequence[Any], Any]:
    return root.arrays, (root.index, root.definition, root.places)


def _flatten_root_with_keys(root: Root) -> tuple[list[tuple[PathKey, Any]], Any]:
    arrays, about = _flatten_root(root)
    return list(zip(map(PathKey, root.places), arrays, strict=True)), about


jax.tree_util.register_pytree_with_keys(
    Root,
    _flatten_root_with_keys,
    lambda about, arrays: Root(tuple(arrays), *about),
    _flatten_root,
)

_is_root = Root.__instancecheck__


def mark_roots(leaves: Sequence[list[Any]], found: list[Given]) -> None:
    """Replaces the modules in lists of leaves by `Root`. The Variables in the modules become parts
    of the structure, and are added to `found`."""
    flax = nnx()
    places = [
        (of, i) for of in leaves for i, leaf in enumerate(of) if is_kind_of_module(type(leaf))
    ]
    if not places:
        return
    roots = [of[i] for of, i in places]
    with finding(found):
        definition, state = flax.flatten(roots, graph=True)
    arrays: list[list[Any]] = [[] for _ in roots]
    names: list[list[str]] = [[] for _ in roots]
    trees = []
    for path, leaf in zip(state.paths, state.leaves, strict=True):
        value = leaf.get_raw_value() if isinstance(leaf, flax.Variable) else leaf
        inner, tree = jax.tree_util.tree_flatten_with_path(value)
        trees.append(tree)
        for key, array in inner:
            arrays[path[0]].append(array)
            names[path[0]].append(path_name((*path[1:], *key)))
    about = definition, tuple(trees)
    for index, (of, i) in enumerate(places):
        of[i] = Root(tuple(arrays[index]), index, about, tuple(names[index]))


def with_modules(tree: Any) -> Any:
    """Returns a tree in which each `Root` is replaced by the module made of its arrays."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda n: _is_root(n) or is_variable(n))
    roots = [leaf for leaf in leaves if _is_root(leaf)]
    if not roots:
        return tree
    definition, trees = roots[0].definition
    arrays = [array for root in roots for array in root.arrays]
    values, start = [], 0
    for inner in trees:
        values.append(jax.tree.unflatten(inner, arrays[start : start + inner.num_leaves]))
        start += inner.num_leaves
    modules = nnx().unflatten(definition, values)
    return jax.tree.unflatten(
        structure, [modules[leaf.index] if _is_root(leaf) else leaf for leaf in leaves]
    )


def objects_in(tree: Any) -> list[Any]:
    """Returns all objects of flax.nnx in a tree, in the order in which flax finds them."""
    roots = list(filter(is_module, jax.tree.leaves(tree, is_leaf=is_module_or_variable)))
    return [node for _, node in nodes_in(roots) if is_module(node)]


def nodes_in(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns flax's paths and the nodes of a tree, each object once."""
    with finding([]):  # flax would have JAX read the Variables in them
        return list(nnx().iter_graph(tree, graph=True))


# ------------------------------------------------------------------------- what a function changes


class Update(NamedTuple):
    """Where a function has assigned a new array: an attribute of a module, or, if `name` is None,
    the value of an nnx.Variable: its leaf `leaf`, or the whole value if `leaf` is None. `place` is
    the index of the module or nnx.Variable among the objects of the call."""

    place: int
    name: str | None
    leaf: int | None = None

    def assign(self, objects: Sequence[Any], value: Any) -> None:
        """Assigns the value to its object, one of the `objects` of a call."""
        node = objects[self.place]
        if self.name is not None:
            setattr(node, self.name, value)
        elif self.leaf is None:
            node.set_raw_value(value)
        else:
            set_leaf(node, self.leaf, value)


class Snapshot:
    """A snapshot of the objects and arrays in the modules of a call.

    Attributes:
      objects: the modules and nnx.Variables, each once.
    """

    def __init__(self, tree: Any):
        survey = Survey()
        self.leaves, self._tree = survey.flatten(tree, [])
        self.objects: list[Any] = survey.objects
        self._is_opaque = any(map(is_opaque, self.leaves))
        if self._is_opaque:
            self.objects = objects_in(tree)
        self._arrays = [] if self._is_opaque else [list(_arrays_of(node)) for node in self.objects]

    def changed(self, tree: Any, gone: Iterable[Any]) -> list[tuple[Update, Any]] | None:
        """Returns the new arrays in the modules; None if the modules have other objects now, or
        another structure.

        Args:
          tree: the same arguments, after the function has run.
          gone: donated arrays. They count as changed, since the caller needs a new array.
        """
        now = Snapshot(tree)
        is_same = self._tree == now._tree and len(self.objects) == len(now.objects)
        if self._is_opaque or not is_same:
            return None
        if any(a is not b for a, b in zip(self.objects, now.objects, strict=True)):
            return None
        lost, found = {*map(id, gone)}, []
        count = 0
        for place, (old, new) in enumerate(zip(self._arrays, now._arrays, strict=True)):
            if [where[:2] for where in old] != [where[:2] for where in new]:
                return None  # for example: a NumPy array has replaced a jax.Array
            for (name, leaf, before), (_, _, after) in zip(old, new, strict=True):
                count += before is not after
                if before is not after or id(after) in lost:
                    found.append((Update(place, name, leaf), after))
        # `_arrays_of` finds no arrays in lists and dicts of a module. If one has changed, an
        # `Update` cannot say where.
        in_all = sum(a is not b for a, b in zip(self.leaves, now.leaves, strict=True))
        return found if count == in_all else None


def _arrays_of(node: Any) -> Iterable[tuple[str | None, int | None, Any]]:
    """Returns the arrays of one object, with the `name` and `leaf` of an `Update`."""
    if isinstance(node, nnx().Variable):
        value = node.get_raw_value()
        if isinstance(value, jax.Array):
            return [(None, None, value)]
        return [(None, i, leaf) for i, leaf in enumerate(jax.tree.leaves(value))]
    return [(name, None, x) for name, x in vars(node).items() if isinstance(x, jax.Array)]


class Twins(NamedTuple):
    """The result of a program whose function has changed the structure of modules.

    Attributes:
      objects: for each object of the call its twin: the object as the function has left it.
      result: the function's result, which may contain twins.
    """

    objects: list[Any]
    result: Any

    def taken_over(self, objects: Sequence[Any]) -> Any:
        """Gives the contents of the twins to the caller's objects. Returns the result with the
        caller's objects instead of the twins."""
        known = {id(twin): mine for twin, mine in zip(self.objects, objects, strict=True)}

        def mine(tree: Any) -> Any:
            return _exchanged(tree, lambda x: known.get(id(x), x))

        for each in objects_in(tuple(self)):
            node = known.get(id(each), each)
            if isinstance(each, nnx().Variable):
                node.set_raw_value(each.get_raw_value())
                node.update_from_state(each)  # its metadata too
            else:
                attributes = {name: mine(value) for name, value in vars(each).items()}
                vars(node).clear()
                vars(node).update(attributes)
        return mine(self.result)


def is_state(node: object) -> bool:
    """Whether an object is an nnx.State."""
    return is_kind_of_state(type(node))


def is_whole_or_variable(node: object) -> bool:
    """For ``is_leaf=``: whether a node is a module, an nnx.State or a Variable (so that flattening
    does not read the Variable)."""
    return is_module_or_variable(node) or is_state(node)


def is_module_or_variable(node: object) -> bool:
    """For ``is_leaf=``: whether a node is a module or a Variable (so that flattening does not read
    the Variable)."""
    return is_variable(node) or is_kind_of_module(type(node))
