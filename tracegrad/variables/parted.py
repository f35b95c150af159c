"""A tree in two parts: the leaves that count, and the rest.

The leaves that count are, for example, the traced or the differentiated ones. A function of the
tree becomes a function of these leaves, which puts the two parts together again, as with
`equinox.partition` and `equinox.combine`.
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
    def of(
        cls, tree: Any, counts: Callable[[Any], bool], is_leaf: Callable[[Any], bool] | None = None
    ) -> Parted:
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
        return cls(leaves, structure, list(map(counts, leaves)))

    @property
    def chosen(self) -> list[Any]:
        """The leaves that count."""
        return self.of_chosen(self.leaves)

    @property
    def rest(self) -> Parted:
        """The same tree with None in the place of each leaf that counts."""
        pairs = zip(self.leaves, self.counted, strict=True)
        return Parted([None if c else leaf for leaf, c in pairs], self.structure, self.counted)

    def of_chosen(self, each: Iterable[Any]) -> list[Any]:
        """Selects from items, one for each leaf: returns the items of the leaves that count."""
        return list(itertools.compress(each, self.counted))

    def combine(self, values: Iterable[Any]) -> Any:
        """Returns the tree with `values` in the places of the leaves that count."""
        rest = iter(values)
        pairs = zip(self.leaves, self.counted, strict=True)
        return jax.tree.unflatten(self.structure, [next(rest) if c else leaf for leaf, c in pairs])
