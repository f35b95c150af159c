"""Checks that `jax.export` can write the pytrees of a function, and shows them as text.

`jax.export` writes dictionaries with string keys, lists, tuples, None, and registered types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from tracegrad import _jax
from tracegrad.ir.paths import path_name


def of_types(structure: Any, avals: Sequence[Any]) -> Any:
    return jax.tree.unflatten(structure, [_jax.struct(aval.shape, aval.dtype) for aval in avals])


def check_leaves(tree: Any, where: str) -> None:
    """Raises TypeError, with the path, for a leaf that is not an array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not hasattr(leaf, "shape"):
            raise TypeError(
                f"{path_name(path, where)} is {leaf!r} of type {type(leaf).__name__}, "
                "which no file can hold (only arrays are saved): let the function close over it"
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

    return repr(jax.tree.map(text, tree))
