"""Recognises and describes objects of flax.nnx, without importing flax.

If flax is not imported, there are no modules of flax. Only public names of flax are used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tracegrad._jax.caches import cached
from tracegrad.ir.wording import shortened
from tracegrad.variables.paths import path_name

# The prefix of attributes that nnx writes into every module.
_OF_NNX = "_pytree__"


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


def find_path(wanted: object, module: Any) -> str | None:
    """``linear.kernel``; None if the object is not in the module."""
    for path, node in nnx().iter_graph(module, graph=True):
        if node is wanted:
            return path_name(path)
    return None


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Compares two descriptions: ``("`model.dropout.deterministic`", "False", "True")``. Leaves out
    differences below a path that differs itself."""
    paths = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    within = tuple(f"{path}." for path in paths)
    return [
        (f"`{path}`", shortened(old.get(path, "absent")), shortened(new.get(path, "absent")))
        for path in paths
        if not path.startswith(within)
    ]


def attribute_texts(modules: Sequence[Any], names: Sequence[str]) -> dict[str, str]:
    """Describes, by path, the classes and the static attributes of modules and their parts."""
    flax = nnx()
    texts: dict[str, str] = {}
    for path, node in flax.iter_graph(list(modules), graph=True):
        if not is_module(node):
            continue
        where = path_name(path[1:], names[path[0]])
        texts[where] = f"a {type(node).__name__}"
        attributes = static_attributes(node)
        if isinstance(node, flax.Variable):
            attributes = node.get_metadata()
            inner = jax.tree.structure(node.get_raw_value())
            tree = repr(inner).removeprefix("PyTreeDef(").removesuffix(")")
            texts[f"{where}.value"] = "an array" if tree == "*" else tree
        texts.update({f"{where}.{name}": repr(value) for name, value in attributes.items()})
    return texts


def static_attributes(module: Any) -> dict[str, Any]:
    """The attributes without data, by name."""
    if isinstance(module, nnx().Variable):
        return {}
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith(_OF_NNX) and not _has_data(value)
    }


def _has_data(value: Any) -> bool:
    return any(map(_is_data, jax.tree.leaves(value, is_leaf=_is_data)))


def _is_data(value: Any) -> bool:
    # A module that is being traced holds tracers, which flax's `is_data` does not count as data.
    return isinstance(value, jax.Array) or nnx().is_data(value)


def keys_of_path(path: Sequence[Any]) -> tuple[Any, ...]:
    """Turns a path of JAX into flax's: the names, keys and indices themselves."""
    names = ("name", "key", "idx")
    return tuple(next((getattr(k, n) for n in names if hasattr(k, n)), k) for k in path)
