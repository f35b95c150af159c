"""Converts pytrees to the form that `jax.export` writes, and to text for people.

`jax.export` writes dictionaries with string keys, lists, tuples, None, and registered types. Two
more types are registered here. `Text` is a string: it is static, so a call must have the string for
which the function was saved. `Numbered` is a dictionary with integer keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from tracegrad import _jax
from tracegrad.ir.paths import path_name


class Text(str):
    """A string in a tree, as a node without leaves."""

    __slots__ = ()


class Numbered(dict[int, Any]):
    """A dictionary with integers for keys."""


jax.tree_util.register_pytree_node(Text, lambda text: ((), str(text)), lambda text, _: Text(text))
jax.export.register_pytree_node_serialization(
    Text,
    serialized_name="tracegrad.Text",
    serialize_auxdata=str.encode,
    deserialize_auxdata=lambda text: bytes(text).decode(),
)
jax.tree_util.register_pytree_node(
    Numbered,
    lambda d: ([d[key] for key in sorted(d)], tuple(sorted(d))),
    lambda keys, parts: Numbered(zip(keys, parts)),
)
jax.export.register_pytree_node_serialization(
    Numbered,
    serialized_name="tracegrad.Numbered",
    serialize_auxdata=lambda keys: json.dumps(keys).encode(),
    deserialize_auxdata=lambda text: tuple(json.loads(text)),
)


def written_form(tree: Any) -> Any:
    """Converts a tree to the form that `jax.export` writes, with `Text` and `Numbered`."""

    def has_numbers(node: Any) -> bool:
        return type(node) is dict and any(type(key) is int for key in node)

    def convert(node: Any) -> Any:
        if has_numbers(node):
            return Numbered({key: written_form(part) for key, part in node.items()})
        return Text(node) if isinstance(node, str) else node

    return jax.tree.map(convert, tree, is_leaf=has_numbers)


def original_form(tree: Any) -> Any:
    """The inverse of `written_form`."""

    def is_ours(node: Any) -> bool:
        return isinstance(node, (Text, Numbered))

    def convert(node: Any) -> Any:
        if isinstance(node, Numbered):
            return {key: original_form(part) for key, part in node.items()}
        return str(node) if isinstance(node, Text) else node

    return jax.tree.map(convert, tree, is_leaf=is_ours)


def node_types(structure: Any) -> set[type]:
    """Returns the types of the containers and of the leaves."""
    found: set[type] = set()

    def add(node: Any) -> bool:
        found.add(type(node))
        return False

    jax.tree.leaves(jax.tree.unflatten(structure, range(structure.num_leaves)), is_leaf=add)
    return found


def is_original(structure: Any) -> bool:
    return node_types(structure).isdisjoint((Text, Numbered))


def of_types(structure: Any, avals: Sequence[Any]) -> Any:
    return jax.tree.unflatten(structure, [_jax.struct(aval.shape, aval.dtype) for aval in avals])


def check_leaves(tree: Any, where: str) -> None:
    """Raises TypeError, with the path, for a leaf that is not an array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not hasattr(leaf, "shape"):
            raise TypeError(
                f"{path_name(path, where)} is {leaf!r} of type {type(leaf).__name__}, "
                "which no file can hold (only arrays and strings are saved): let the function "
                "close over it"
            )


def check_containers(tree: Any, where: str) -> None:
    """Raises TypeError for a container that `jax.export` cannot write."""
    small = jax.tree.map(lambda _: _jax.struct((), np.uint8), tree)  # leaves do not matter
    try:
        jax.export.export(jax.jit(lambda tree: ()))(small).serialize(vjp_order=0)
    except Exception as error:
        raise TypeError(
            f"{where} has a container that cannot be saved: {str(error).rstrip('.')}. Its Python "
            "code rebuilds it, and no code is saved: convert it to a dictionary, list or tuple; or "
            "pass its arrays (`jax.tree.leaves`) to a function that closes over the rest of it; or "
            "let the function close over all of it. If the process that loads the function has the "
            "class too, register the class in both processes with "
            "jax.export.register_namedtuple_serialization or register_pytree_node_serialization"
        ) from error


class _Shown:
    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


def tree_text(tree: Any) -> str:
    """As one line: ``{'x': f32[rows,3]}``."""

    def text(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        kind = _jax.type_text(jax.core.ShapedArray((), leaf.dtype)).removesuffix("[]")
        sizes = (str(size).replace(" ", "") for size in leaf.shape)
        return _Shown(f"{kind}[{','.join(sizes)}]")

    return repr(original_form(jax.tree.map(text, tree)))
