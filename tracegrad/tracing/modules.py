"""Modules of `flax.nnx` among the arguments of a call: how they enter a program, and leave it.

A program takes the arrays of a module like the arrays of any tree, and the function gets a module
made of traced arrays. Modules differ from other trees in two ways. First, an object can occur
twice, in another argument or inside itself, and must be one object inside the function too: a
`RepeatedObject` takes the place of the second occurrence. Second, the caller sees the function's
assignments in a module: the new arrays are outputs of the program (`Snapshot.changed`), and the
caller's objects get them (`Update.assign`). If the function changes the structure of a module, the
program returns whole modules (`ResultWithModules`), and the caller's objects get their attributes.

This file does not import flax: if nobody else has imported it, there are no modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from tracegrad._jax.caches import cached
from tracegrad.tracing.nnx_objects import (
    is_kind_of_module,
    is_kind_of_state,
    nnx,
    set_leaf,
)
from tracegrad.tracing.statics import NonArrayNode, structure_with
from tracegrad.variables.trees import (
    VariableNode,
    finding_variables,
    flatten_finding_variables,
    is_variable,
)

# -------------------------------------------------------------------- objects that occur twice


@jax.tree_util.register_static
@dataclass(frozen=True)
class RepeatedObject(NonArrayNode):
    """A node without leaves, in the place of an nnx object that occurred before.

    Attributes:
      place: the index of the object in `NnxObjectFinder.objects`.
    """

    place: int

    def __repr__(self) -> str:
        return f"<object {self.place} again>"


_repeated_object = cached(4096)(RepeatedObject)  # one for each place: layouts compare identities


class NnxObjectFinder:
    """An ``is_leaf=`` for flattening the trees of one call: collects the nnx objects, and makes the
    second occurrence of an object a leaf.

    The nnx.Variables of an nnx.State outside of modules are not collected: a function gets a copy
    of a state, as of any tree.

    Attributes:
      objects: the modules and nnx.Variables, each once, in the order of flattening.
    """

    def __init__(self, objects: Iterable[Any] = ()):
        self.objects = list(objects)
        self._has_repeated = False
        # By identity; `objects` and the caller keep the objects alive.
        self._places = {id(node): i for i, node in enumerate(self.objects)}
        self._states: set[int] = set()

    def __call__(self, node: Any) -> bool:
        if not is_kind_of_module(type(node)):
            return id(node) in self._states
        if id(node) in self._places:
            self._has_repeated = True
            return True
        self._places[id(node)] = len(self.objects)
        self.objects.append(node)
        return False

    def flatten(self, tree: Any, found: list[VariableNode] | None) -> tuple[list[Any], Any]:
        """Returns the leaves of a tree, with `RepeatedObject`s among them, and its structure. If
        `found` is None, Variables are leaves; else see `trees.flatten_finding_variables`."""
        states: list[Any] = []
        if not is_kind_of_module(type(tree)):
            nodes = jax.tree.leaves(tree, is_leaf=is_whole_or_variable)
            states = [node for node in nodes if is_state(node)]
        self._states = set(map(id, states))
        if found is None:
            leaves, structure = jax.tree.flatten(tree, lambda n: is_variable(n) or self(n))
        else:
            leaves, structure = flatten_finding_variables(tree, found, self)
        if self._has_repeated:
            for i, leaf in enumerate(leaves):
                if is_kind_of_module(type(leaf)) and not jax.tree_util.all_leaves([leaf]):
                    leaves[i] = _repeated_object(self._places[id(leaf)])
        if states:
            structure = structure_with(structure, [x if is_state(x) else None for x in leaves])
            leaves = [
                x for leaf in leaves for x in (jax.tree.leaves(leaf) if is_state(leaf) else [leaf])
            ]
        return leaves, structure


def restore_repeated_objects(tree: Any, objects: Iterable[Any] = ()) -> Any:
    """Replaces each `RepeatedObject` in a tree by its object.

    Args:
      objects: the nnx objects that occurred before the tree; the places count them first.
    """
    finder = NnxObjectFinder(objects)
    before = len(finder.objects)
    finder.flatten(tree, [])

    def restore(part: Any) -> Any:
        return _exchange_objects(part, lambda x: finder.objects[x.place] if _is_repeated(x) else x)

    for node in finder.objects[before:]:
        for name, value in _attributes(node):
            new = restore(value)
            if new is not value:
                object.__setattr__(node, name, new)
    return restore(tree)


def _exchange_objects(tree: Any, other: Callable[[Any], Any]) -> Any:
    """Maps the nnx objects and `RepeatedObject`s of a tree by `other`; returns the tree itself if
    `other` changes none."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_repeated_or_module)
    others = list(map(other, leaves))
    if all(a is b for a, b in zip(leaves, others, strict=True)):
        return tree
    return jax.tree.unflatten(structure, others)


_is_repeated = RepeatedObject.__instancecheck__


def _is_repeated_or_module(node: object) -> bool:
    return _is_repeated(node) or is_module_or_variable(node)


def _attributes(node: Any) -> Iterable[tuple[str, Any]]:
    """Returns the attributes of an nnx object that may hold other nnx objects."""
    if isinstance(node, nnx().Variable):
        return (("_raw_value", node.get_raw_value()),)
    return list(vars(node).items())


def nnx_nodes_in(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns (flax's path, node) for each node, each object once."""
    with finding_variables():  # else flax would have JAX read the Variables in the tree
        return list(nnx().iter_graph(tree, graph=True))


# ------------------------------------------------------------------------- changes of a function


class Update(NamedTuple):
    """The place where a function has assigned a new array.

    Attributes:
      place: the index of the module or nnx.Variable among the objects of the call.
      name: the attribute of the module; None for an nnx.Variable.
      leaf: the leaf of the nnx.Variable's value; None for the whole value.
    """

    place: int
    name: str | None
    leaf: int | None

    def assign(self, objects: Sequence[Any], value: Any) -> None:
        """`objects`: the caller's objects, in the order of the call."""
        node = objects[self.place]
        if self.name is not None:
            setattr(node, self.name, value)
        elif self.leaf is None:
            node.set_raw_value(value)
        else:
            set_leaf(node, self.leaf, value)


class Snapshot:
    """The objects and arrays in the modules of a call, at one time.

    Attributes:
      objects: the modules and nnx.Variables, each once.
    """

    def __init__(self, tree: Any):
        finder = NnxObjectFinder()
        self.leaves, self._tree = finder.flatten(tree, [])
        self.objects: list[Any] = finder.objects
        self._arrays = [list(_arrays_of(node)) for node in self.objects]

    def changed(self, tree: Any, gone: Iterable[Any]) -> list[tuple[Update, Any]] | None:
        """Returns the new arrays in the modules; None if the modules have other objects now, or
        another structure.

        Args:
          tree: the same arguments, after the function has run.
          gone: donated arrays. Each counts as changed, since the caller needs a new array.
        """
        now = Snapshot(tree)
        is_same = self._tree == now._tree and len(self.objects) == len(now.objects)
        if not is_same:
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
        # `_arrays_of` finds no arrays in lists and dicts of a module, and no `Update` names such a
        # place: if an array there has changed, return None.
        in_all = sum(a is not b for a, b in zip(self.leaves, now.leaves, strict=True))
        return found if count == in_all else None


def _arrays_of(node: Any) -> Iterable[tuple[str | None, int | None, Any]]:
    """Returns (name, leaf, array) for each array of one object; see `Update`."""
    if isinstance(node, nnx().Variable):
        value = node.get_raw_value()
        if isinstance(value, jax.Array):
            return [(None, None, value)]
        return [(None, i, leaf) for i, leaf in enumerate(jax.tree.leaves(value))]
    return [(name, None, x) for name, x in vars(node).items() if isinstance(x, jax.Array)]


class ResultWithModules(NamedTuple):
    """The result of a program whose function has changed the structure of modules.

    Attributes:
      objects: for each nnx object of the call, the function's copy as the function has left it.
      result: the function's result, which may contain these copies.
    """

    objects: list[Any]
    result: Any

    def flatten(self) -> tuple[list[Any], Any]:
        """Returns the leaves, and a structure in which the Variables in modules are nodes; other
        Variables are leaves."""
        finder = NnxObjectFinder()
        pairs = finder.flatten(self.objects, []), finder.flatten(self.result, None)
        (objects, of_objects), (others, of_result) = pairs
        whole: Any = jax.tree.structure(ResultWithModules([], None))
        tree = jax.tree_util.PyTreeDef.from_node_data_and_children(
            jax.tree_util.default_registry, whole.node_data(), [of_objects, of_result]
        )
        return [*objects, *others], tree

    def write_back(self, objects: Sequence[Any]) -> Any:
        """Gives the contents of the function's copies to the caller's objects. Returns the result
        with the caller's objects instead of the copies."""
        originals = {id(copy): node for copy, node in zip(self.objects, objects, strict=True)}

        def with_originals(tree: Any) -> Any:
            return _exchange_objects(tree, lambda x: originals.get(id(x), x))

        finder = NnxObjectFinder()
        finder.flatten(tuple(self), [])
        for each in finder.objects:
            node = originals.get(id(each), each)
            if isinstance(each, nnx().Variable):
                node.set_raw_value(each.get_raw_value())
                node.update_from_state(each)  # its metadata too
            else:
                attributes = {name: with_originals(value) for name, value in vars(each).items()}
                vars(node).clear()
                vars(node).update(attributes)
        return with_originals(self.result)


def is_state(node: object) -> bool:
    return is_kind_of_state(type(node))


def is_whole_or_variable(node: object) -> bool:
    """For ``is_leaf=``: modules and nnx.States stay whole, and no Variable is read."""
    return is_module_or_variable(node) or is_state(node)


def is_module_or_variable(node: object) -> bool:
    """For ``is_leaf=``: modules stay whole, and no Variable is read."""
    return is_variable(node) or is_kind_of_module(type(node))
