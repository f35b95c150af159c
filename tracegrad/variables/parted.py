"""A tree in two parts: the leaves that count, and the rest.

As `equinox.partition` and `equinox.combine`: a function of a tree becomes one of the leaves that
count (those that are traced, or differentiated), and the two parts are put together inside of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, eq=False)
class Parted:
    """A tree, of which some leaves count.

    Attributes:
      leaves, structure: the tree as JAX flattens it.
      counted: of each leaf whether it counts.
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
        """The same without the leaves that count: None stands for each."""
        pairs = zip(self.leaves, self.counted, strict=True)
        return Parted([None if c else leaf for leaf, c in pairs], self.structure, self.counted)

    def of_chosen(self, each: Iterable[Any]) -> list[Any]:
        """Of something for each leaf what there is for the leaves that count."""
        return list(itertools.compress(each, self.counted))

    def combine(self, values: Iterable[Any]) -> Any:
        """The tree with these in the places of the leaves that count."""
        rest = iter(values)
        pairs = zip(self.leaves, self.counted, strict=True)
        return jax.tree.unflatten(self.structure, [next(rest) if c else leaf for leaf, c in pairs])
