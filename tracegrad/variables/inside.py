"""The modules that a function gets while it is traced, and what of modules comes out of it.

They are made of the traced arrays. What has another value in them when the function is over is an
output of its program; a module that it returns is one of the caller's, or a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tracegrad.variables.modules import (
    Held,
    Modules,
    Structure,
    hold,
    is_held,
    is_held_or_variable,
    is_whole,
    read,
)
from tracegrad.variables.nnx_objects import described, differences, is_module
from tracegrad.variables.variable import Variable


class Reference:
    """In a result, one of the objects in the modules of a call: a node without leaves."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


jax.tree_util.register_pytree_node(
    Reference, lambda reference: ((), reference.index), lambda index, _: Reference(index)
)


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
