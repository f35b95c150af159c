"""Recognises objects of flax.nnx, without importing flax.

If flax is not imported, there are no modules of flax. Only public names of flax are used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax

from tracegrad._jax.caches import cached


def nnx() -> Any:
    """None unless flax.nnx is imported completely."""
    module = sys.modules.get("flax.nnx")
    return module if hasattr(module, "Variable") and hasattr(module, "Pytree") else None


# Cached, since each call asks this for every node of its arguments: `issubclass` is five times
# slower.
@cached(4096)
def is_kind_of_module(kind: type) -> bool:
    """nnx.Variables count as modules."""
    flax = nnx()
    return flax is not None and issubclass(kind, (flax.Pytree, flax.Variable))


@cached(4096)
def is_kind_of_state(kind: type) -> bool:
    """A function gets a copy of a state."""
    flax = nnx()
    return flax is not None and issubclass(kind, flax.State)


def is_module(node: object) -> bool:
    """nnx.Variables count as modules."""
    return is_kind_of_module(type(node))


def is_variable_of_nnx(node: object) -> bool:
    """For ``is_leaf=``."""
    flax = nnx()
    return flax is not None and isinstance(node, flax.Variable)


def set_leaf(variable: Any, leaf: int, value: Any) -> None:
    leaves, structure = jax.tree.flatten(variable.get_raw_value())
    leaves[leaf] = value
    variable.set_raw_value(jax.tree.unflatten(structure, leaves))


def ignore_cached_partial() -> None:
    """Enters a transformation of flax: `nnx.cached_partial` raises an error if the function that it
    calls enters none. (Programs of this package do not need its cache.)"""
    context = getattr(nnx().graphlib, "GRAPH_CONTEXT", None)  # entering it takes microseconds
    if getattr(context, "tmp_static_cache", None) is not None:
        with nnx().update_context("tracegrad"):
            pass


def refuse_hijax(leaf: object) -> None:
    """Raises TypeError for an nnx.Variable that is not a tree but has a JAX type of its own (an
    experiment of flax and JAX; `nnx.jit` does not support it on all versions either)."""
    if is_variable_of_nnx(leaf) and not is_module(leaf):
        raise TypeError(
            "a variable of this model was made with nnx.var_defaults(hijax=True), which is not "
            "supported: pass nnx.with_vars(model, hijax=False) instead of the model"
        )


def keys_of_path(path: Sequence[Any]) -> tuple[Any, ...]:
    """Turns a path of JAX into flax's: the names, keys and indices themselves."""
    names = ("name", "key", "idx")
    return tuple(next((getattr(k, n) for n in names if hasattr(k, n)), k) for k in path)
