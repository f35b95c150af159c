"""How the leaves of models are called, and which of them are trained.

Called as their frameworks call them, ``blocks.0.attention.kernel``, whether they are in attributes,
in dicts or in lists. What frameworks train can be told of flax.nnx, by the classes of its
variables, and of flax.linen, by the collections.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import jax

from tracegrad.variables.variable import Variable


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a tree.

    Attributes:
      name: its path, ``"blocks.0.kernel"``; ``""`` for a tree that is one leaf.
      holder: what holds it for the tree: a variable of flax.nnx, or one of ours; else None.
    """

    name: str
    holder: Any

    @property
    def is_module_state(self) -> bool:
        """Whether a variable of flax.nnx holds it."""
        return self.holder is not None and not isinstance(self.holder, Variable)

    @property
    def is_trained(self) -> bool:
        """Whether it may be meant to get a gradient: no statistics of a module, no counts."""
        return not self.is_module_state or isinstance(self.holder, sys.modules["flax.nnx"].Param)


def leaves_of(tree: Any) -> list[Leaf]:
    """The leaves of a tree as JAX has them; of Variables their values."""
    holders = (Variable, sys.modules["flax.nnx"].Variable) if has_modules() else (Variable,)
    found = []
    for path, node in jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, holders)
    )[0]:
        if not isinstance(node, holders):
            found.append(Leaf(path_name(path), None))
        elif isinstance(node, Variable):
            found.append(Leaf(path_name(path), node))
        else:
            for inside, _ in jax.tree_util.tree_flatten_with_path(node)[0]:
                found.append(Leaf(path_name((*path, *inside[1:])), node))  # without its "value"
    return found


def path_name(path: Any) -> str:
    """A path of JAX as text: ``blocks.0.kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def within(name: str, leaf: Leaf) -> str:
    """A leaf of what has a name: ``params.dense.kernel``."""
    return f"{name}.{leaf.name}" if name and leaf.name else name or leaf.name


def has_modules() -> bool:
    """Whether there can be modules of flax.nnx: nothing is imported for them."""
    return "flax.nnx" in sys.modules
