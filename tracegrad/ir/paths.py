"""The spelling of paths to arrays in trees: ``model.blocks.0.kernel``.

All messages, `wrt` and `match.param` use this spelling, for attributes, dicts and lists alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax


class PathKey:
    """A whole path as one key of JAX: for a node that replaces an argument, the path to an array
    in the original argument."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __str__(self) -> str:  # JAX's own messages append it to the argument's name
        return self.name and f".{self.name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PathKey) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def path_name(path: Iterable[Any], of: str = "") -> str:
    """Spells a path of JAX or of flax, after the name `of` of its tree.

    >>> import jax
    >>> model = {"blocks": [{"kernel": 1.0}]}
    >>> [path_name(path, "model") for path, _ in jax.tree.leaves_with_path(model)]
    ['model.blocks.0.kernel']
    """
    return ".".join(filter(None, (of, *map(key_name, path))))


def is_named_alike(leaves: Iterable[tuple[Any, Any]], others: Iterable[tuple[Any, Any]]) -> bool:
    """Whether each path in `leaves` begins the path at the same place of `others`, apart from
    positions in lists.

    So the leaves of a flat list fit any tree, and the leaves of a dict fit a tree with the same
    keys in the same order.

    >>> import jax
    >>> leaves = jax.tree.leaves_with_path
    >>> params = leaves(({"w": 1.0, "b": 2.0}, 3.0))
    >>> [is_named_alike(leaves(tree), params) for tree in ([4, 5, 6], [{"b": 4, "x": 5}, 6])]
    [True, False]
    """

    def names(leaf: tuple[Any, Any]) -> list[str]:
        return [key_name(key) for key in leaf[0] if not isinstance(key, _POSITIONS)]

    pairs = zip(map(names, leaves), map(names, others), strict=True)
    return all(own == other[: len(own)] for own, other in pairs)


_POSITIONS = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)
# The attribute with the text of a key. (`jax.tree_util.keystr` takes five times as long, and
# tracing a model names thousands of keys.)
_TEXTS = {
    PathKey: "name",
    jax.tree_util.GetAttrKey: "name",
    jax.tree_util.DictKey: "key",
    jax.tree_util.FlattenedIndexKey: "key",
    jax.tree_util.SequenceKey: "idx",
}


def key_name(key: Any) -> str:
    attribute = _TEXTS.get(type(key))
    return str(key if attribute is None else getattr(key, attribute))  # a key of flax is a text
