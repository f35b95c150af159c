"""The spelling of paths to arrays in trees: ``model.blocks.0.kernel``.

All messages, `wrt` and `match.param` use it, for attributes, dicts and lists alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax


class PathKey:
    """A whole path as one key of a path of JAX: the path to an array in the original argument, for
    a node that replaces the argument."""

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
    """Returns a path of JAX or of flax as text, after the name `of` of its tree.

    >>> import jax
    >>> model = {"blocks": [{"kernel": 1.0}]}
    >>> [path_name(path, "model") for path, _ in jax.tree.leaves_with_path(model)]
    ['model.blocks.0.kernel']
    """
    return ".".join(filter(None, (of, *map(_key_name, path))))


def _key_name(key: Any) -> str:
    if isinstance(key, PathKey):
        return key.name
    return jax.tree_util.keystr((key,), simple=True)  # for a key of flax, the key as text
