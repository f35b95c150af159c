"""How the place of an array in a tree is spelled: ``model.blocks.0.kernel``.

Every message, `wrt` and `match.param` spell it so, whether attributes, dicts or lists lead there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax


class PathKey:
    """The whole way to an array in what stands for an argument, as one key of JAX's path."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __str__(self) -> str:  # JAX's own messages put it right behind the argument's name
        return self.name and f".{self.name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PathKey) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def path_name(path: Iterable[Any], of: str = "") -> str:
    """A path of JAX or of flax as text, behind the name of what it is a path in.

    >>> import jax
    >>> model = {"blocks": [{"kernel": 1.0}]}
    >>> [path_name(path, "model") for path, _ in jax.tree.leaves_with_path(model)]
    ['model.blocks.0.kernel']
    """
    return ".".join(filter(None, (of, *map(_key_name, path))))


def _key_name(key: Any) -> str:
    if isinstance(key, PathKey):
        return key.name
    return jax.tree_util.keystr((key,), simple=True)  # of a key of flax, the key itself
