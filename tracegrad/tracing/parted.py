"""A tree in two parts: the leaves that count (the traced or differentiated leaves), and the rest.

A function of the tree becomes a function of the leaves that count, which combines them with the
rest, as with `equinox.partition` and `equinox.combine`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, eq=False)
class Parted:
    """A tree with some leaves that count.

    Attributes:
      leaves, structure: the tree as JAX flattens it.
      counted: for each leaf, whether it counts.
    """

    leaves: Sequence[Any]
    structure: Any
    counted: Sequence[bool]

    @classmethod
    def of(cls, tree: Any, counts: Callable[[Any], bool]) -> Parted:
        leaves, structure = jax.tree.flatten(tree)
        return cls(leaves, structure, list(map(counts, leaves)))

    @property
    def chosen(self) -> list[Any]:
        return self.of_chosen(self.leaves)

    @property
    def rest(self) -> Parted:
        """The same tree with None for each leaf that counts."""
        pairs = zip(self.leaves, self.counted, strict=True)
        return Parted([None if c else leaf for leaf, c in pairs], self.structure, self.counted)

    def of_chosen(self, each: Iterable[Any]) -> list[Any]:
        """Takes an item for each leaf; returns the items of the leaves that count."""
        return list(itertools.compress(each, self.counted))

    def combine(self, values: Iterable[Any]) -> Any:
        """`values`: the leaves that count."""
        rest = iter(values)
        pairs = zip(self.leaves, self.counted, strict=True)
        return jax.tree.unflatten(self.structure, [next(rest) if c else leaf for leaf, c in pairs])
