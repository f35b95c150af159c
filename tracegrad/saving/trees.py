"""Trees of arrays as `jax.export` writes them, and as people read them.

`jax.export` writes dictionaries with strings for keys, lists, tuples, None, and what is registered
with it. Two more are registered here: a string, which belongs to what a function is saved for and
is compared where the function is called, and a dictionary with integers for keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from tracegrad import _jax
from tracegrad.variables.paths import path_name


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
    """A tree as `jax.export` writes it."""

    def has_numbers(node: Any) -> bool:
        return type(node) is dict and any(type(key) is int for key in node)

    def convert(node: Any) -> Any:
        if has_numbers(node):
            return Numbered({key: written_form(part) for key, part in node.items()})
        return Text(node) if isinstance(node, str) else node

    return jax.tree.map(convert, tree, is_leaf=has_numbers)


def original_form(tree: Any) -> Any:
    """What `written_form` was given."""

    def is_ours(node: Any) -> bool:
        return isinstance(node, (Text, Numbered))

    def convert(node: Any) -> Any:
        if isinstance(node, Numbered):
            return {key: original_form(part) for key, part in node.items()}
        return str(node) if isinstance(node, Text) else node

    return jax.tree.map(convert, tree, is_leaf=is_ours)


def is_original(structure: Any) -> bool:
    """Whether a tree of this structure is as it was before it was written."""
    tree = jax.tree.unflatten(structure, range(structure.num_leaves))
    return bool(jax.tree.structure(original_form(tree)) == structure)


def of_types(structure: Any, avals: Sequence[Any]) -> Any:
    """The tree of a structure with types in the places of arrays."""
    return jax.tree.unflatten(structure, [_jax.struct(aval.shape, aval.dtype) for aval in avals])


def check_leaves(tree: Any, where: str) -> None:
    """Raises TypeError where a leaf of a tree is no array, naming it."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not hasattr(leaf, "shape"):
            raise TypeError(
                f"{path_name(path, where)} is {leaf!r} of type {type(leaf).__name__}, "
                "which no file can hold (of what is no array, strings are saved): let the function "
                "close over it"
            )


def check_containers(tree: Any, where: str) -> None:
    """Raises TypeError where `jax.export` cannot write a container in a tree, naming it."""
    small = jax.tree.map(lambda _: _jax.struct((), np.uint8), tree)  # only the tree is tried
    try:
        jax.export.export(jax.jit(lambda tree: ()))(small).serialize(vjp_order=0)
    except Exception as error:
        raise TypeError(
            f"{where} has a container that cannot be saved: {str(error).rstrip('.')}. Its Python "
            "code rebuilds it, and no code is saved: make a dictionary, list or tuple of it, pass "
            "its arrays, as `jax.tree.leaves` has them, to a function that closes over the rest of "
            "it, or let the function close over all of it. One that both processes know can be "
            "registered with jax.export.register_namedtuple_serialization or "
            "register_pytree_node_serialization"
        ) from error


class _Shown:
    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


def tree_text(tree: Any) -> str:
    """A tree of arrays, or of their types, as one line: ``{'x': f32[rows,3]}``."""

    def text(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        kind = _jax.type_text(jax.core.ShapedArray((), leaf.dtype)).removesuffix("[]")
        sizes = (str(size).replace(" ", "") for size in leaf.shape)
        return _Shown(f"{kind}[{','.join(sizes)}]")

    return str(original_form(jax.tree.map(text, tree)))
