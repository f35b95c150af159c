"""The names of the leaves of models, and whether a leaf is trained.

Names are as in the frameworks, ``blocks.0.attention.kernel``, for attributes, dicts and lists.
flax.nnx tells trained leaves by the classes of its variables, flax.linen by its collections.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from tracegrad.ir.paths import key_name, path_name
from tracegrad.tracing.nnx_objects import nnx
from tracegrad.variables.variable import Variable


class Leaf(NamedTuple):
    """A leaf of a tree.

    Attributes:
      name: its path, ``"blocks.0.kernel"``; ``""`` for a tree that is one leaf.
      holder: the nnx.Variable or the `Variable` that holds the leaf, if any; else None.
      is_beside_params: whether the leaf is in a sibling of a subtree named ``params``: in another
        collection of flax.linen (``batch_stats``), or in the optimiser's part of a train state.
    """

    name: str
    holder: Any
    is_beside_params: bool = False

    def within(self, name: str) -> Leaf:
        """Puts a prefix before the leaf's name: ``params.dense.kernel``."""
        return self._replace(name=".".join(filter(None, (name, self.name))))

    @property
    def is_module_state(self) -> bool:
        """An nnx.Variable holds the leaf."""
        return self.holder is not None and not isinstance(self.holder, Variable)

    @property
    def is_trained(self) -> bool:
        """False for a leaf that is known to be a statistic or a count."""
        if self.is_module_state:
            return isinstance(self.holder, nnx().Param)
        return not self.is_beside_params


def leaves_of(tree: Any) -> list[Leaf]:
    """In JAX's order of flattening, with a leaf for the value of each Variable."""
    flax, holders = nnx(), _holders()
    # `nnx.grad` gives JAX a `NodeStates` instead of a module: the module's states in sequence.
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
        is_beside = bool(with_params) and any(
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
    return (Variable,) if nnx() is None else (Variable, nnx().Variable)


def _nodes(tree: Any, kinds: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns (path, leaf) for each leaf; nodes of the classes `kinds` are leaves."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, kinds)
    )
    return nodes


def _is_params(key: Any) -> bool:
    return key_name(key) == "params"


def leaves_with_paths(tree: Any, *kinds: type) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns (JAX's path, leaf) for each leaf. The path has no key for the value of an
    nnx.Variable. A `Variable` is a leaf itself, and so are objects of the classes `kinds`."""
    holders = _holders()
    found: list[tuple[tuple[Any, ...], Any]] = []
    for path, node in _nodes(tree, (*holders, *kinds)):
        if isinstance(node, holders) and not isinstance(node, Variable):
            leaves = jax.tree_util.tree_leaves_with_path(node)
            found += [((*path, *inner[1:]), leaf) for inner, leaf in leaves]
        else:
            found.append((path, node))
    return found
