"""How the leaves of models are called, and which of them are trained.

Called as their frameworks call them, ``blocks.0.attention.kernel``, whether they are in attributes,
in dicts or in lists. What frameworks train can be told of flax.nnx, by the classes of its
variables, and of flax.linen, by the collections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from tracegrad.variables.nnx_objects import nnx
from tracegrad.variables.paths import path_name
from tracegrad.variables.variable import Variable


class Leaf(NamedTuple):
    """A leaf of a tree.

    Attributes:
      name: its path, ``"blocks.0.kernel"``; ``""`` for a tree that is one leaf.
      holder: what holds it for the tree: a variable of flax.nnx, or one of ours; else None.
      is_beside_params: whether it stands beside what is called ``params``: in another collection
        of flax.linen (``batch_stats``), in the optimiser's part of a train state.
    """

    name: str
    holder: Any
    is_beside_params: bool = False

    def within(self, name: str) -> Leaf:
        """The same leaf of what has a name: ``params.dense.kernel``."""
        return self._replace(name=".".join(filter(None, (name, self.name))))

    @property
    def is_module_state(self) -> bool:
        """Whether a variable of flax.nnx holds it."""
        return self.holder is not None and not isinstance(self.holder, Variable)

    @property
    def is_trained(self) -> bool:
        """Whether it may be meant to get a gradient: no statistics of a model, no counts."""
        if self.is_module_state:
            return isinstance(self.holder, nnx().Param)
        return not self.is_beside_params


def leaves_of(tree: Any) -> list[Leaf]:
    """The leaves of a tree as JAX has them; of Variables their values."""
    flax, holders = nnx(), _holders()
    # What `nnx.grad` gives to JAX in the place of a module: its states one after the other.
    states = () if flax is None else flax.extract.NodeStates
    nodes: list[tuple[tuple[Any, ...], Any]] = []
    for path, node in _nodes(tree, (*holders, states) if states else holders):
        if states and isinstance(node, states):
            nodes += [((*path, *inside[2:]), held) for inside, held in _nodes(node, holders)]
        else:
            nodes.append((path, node))
    with_params = {
        path[:depth] for path, _ in nodes for depth, key in enumerate(path) if _is_params(key)
    }
    found = []
    for path, node in nodes:
        is_beside = any(
            path[:depth] in with_params and not _is_params(key) for depth, key in enumerate(path)
        )
        if not isinstance(node, holders):
            found.append(Leaf(path_name(path), None, is_beside))
        elif isinstance(node, Variable):
            found.append(Leaf(path_name(path), node, is_beside))
        else:
            for inside, _ in jax.tree_util.tree_flatten_with_path(node)[0]:
                found.append(Leaf(path_name((*path, *inside[1:])), node))  # without its "value"
    return found


def _holders() -> tuple[Any, ...]:
    """The classes of what holds an array for a tree."""
    return (Variable,) if nnx() is None else (Variable, nnx().Variable)


def _nodes(tree: Any, kinds: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of a tree with their paths, where nodes of some classes are leaves."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, kinds)
    )
    return nodes


def named_leaves(
    arguments: Mapping[str, Any], is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """The leaves of arguments, each with its path: ``models.student.kernel``."""
    leaves = jax.tree_util.tree_leaves_with_path(dict(arguments), is_leaf=is_leaf)
    return [(path_name(path), leaf) for path, leaf in leaves]


def _is_params(key: Any) -> bool:
    return path_name((key,)) == "params"


def leaves_with_paths(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of a tree, of Variables themselves, each with its path as JAX has it, in which a
    variable of flax.nnx has no key for its value."""
    holders = _holders()
    found: list[tuple[tuple[Any, ...], Any]] = []
    for path, node in _nodes(tree, holders):
        if isinstance(node, holders) and not isinstance(node, Variable):
            leaves = jax.tree_util.tree_leaves_with_path(node)
            found += [((*path, *inner[1:]), leaf) for inner, leaf in leaves]
        else:
            found.append((path, node))
    return found
