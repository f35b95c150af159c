"""Shardings in the options of `jax.jit` that are trees, like the arguments and results.

An `nnx.StateSharding` determines the sharding of each nnx.Variable in a module.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from tracegrad.ir import Graph
from tracegrad.tracing.modules import nnx_nodes_in
from tracegrad.tracing.nnx_objects import is_variable_of_nnx, nnx
from tracegrad.tracing.packed import Packed
from tracegrad.variables.trees import is_variable


def with_mappings(options: dict[str, Any]) -> dict[str, Any]:
    """Replaces shardings that ``nnx.prefix(graph=True)`` made by an `nnx.StateSharding` for each
    module."""

    def is_prefix(node: object) -> bool:
        return hasattr(node, "graphdef") and hasattr(node, "state")

    def mapping(node: Any) -> Any:
        if not is_prefix(node):
            return node
        flax = nnx()
        whole = node.state if isinstance(node.state, flax.State) else {...: node.state}
        return flax.StateSharding(whole)

    names = options.keys() & {"in_shardings", "out_shardings"}
    return options | {n: jax.tree.map(mapping, options[n], is_leaf=is_prefix) for n in names}


def options_for_jit(options: dict[str, Any]) -> dict[str, Any]:
    """Removes each `nnx.StateSharding`, which `jax.jit` does not know."""
    shardings, of_result = options.get("in_shardings"), options.get("out_shardings")
    if has_mapping(of_result):  # see `shardings_of_result`
        options = {**options, "out_shardings": None}
    if has_mapping(shardings):
        plain = jax.tree.map(
            lambda x: None if _is_mapping(x) else x, shardings, is_leaf=_is_sharding
        )
        options = {**options, "in_shardings": plain}
    return options


def _is_mapping(sharding: object) -> bool:
    """An `nnx.StateSharding`."""
    return hasattr(sharding, "map_prefix")


def has_mapping(shardings: Any) -> bool:
    """A mapping is an `nnx.StateSharding`."""
    return any(map(_is_mapping, jax.tree.leaves(shardings, is_leaf=_is_sharding)))


def is_for_all(shardings: Any) -> bool:
    """Whether `shardings` is one sharding for all arrays of a tree, or None."""
    if _is_mapping(shardings):
        return False
    return shardings is None or jax.tree_util.all_leaves([shardings])


def shardings_of_result(shardings: Any, graph: Graph) -> Packed:
    """For a packed result; some of the shardings are an `nnx.StateSharding`."""
    arrays = graph.out_avals[: graph.result_count]
    return _shardings_along(shardings, Packed(arrays, graph.out_tree))


def shardings_of_arguments(shardings: Any, args: Sequence[Any]) -> Any:
    """Makes trees like the packed arguments from the user's shardings."""
    if not isinstance(shardings, tuple):
        return shardings
    return tuple(
        _shardings_along(prefix, arg) if type(arg) is Packed and not is_for_all(prefix) else prefix
        for prefix, arg in zip(shardings, args, strict=False)
    )


def _shardings_along(prefix: Any, packed: Packed) -> Packed:
    """Returns the sharding of each array of an argument. `prefix`: shardings for a prefix of the
    argument's tree."""
    found: list[tuple[Any, Any]] = []  # pairs (sharding, leaf)

    def of_part(sharding: Any, part: Any) -> None:
        if not _is_mapping(sharding):
            found.extend((sharding, leaf) for leaf in jax.tree.leaves(part, is_leaf=is_variable))
            return
        known = {id(node): of_node for node, of_node in _shardings_of_variables(sharding, part)}
        for x in jax.tree.leaves(part, is_leaf=lambda x: is_variable(x) or is_variable_of_nnx(x)):
            leaves = jax.tree.leaves(x, is_leaf=is_variable)
            found.extend((known.get(id(x)), leaf) for leaf in leaves)

    jax.tree.map(of_part, prefix, packed.argument(), is_leaf=_is_sharding)
    return Packed(packed.select_of_arrays(found), packed.structure)


def _shardings_of_variables(sharding: Any, part: Any) -> list[tuple[Any, Any]]:
    """Returns (nnx.Variable, sharding) for each nnx.Variable in a tree."""
    nodes = [(path, node) for path, node in nnx_nodes_in(part) if is_variable_of_nnx(node)]
    if not _is_mapping(sharding):
        return [(node, sharding) for _, node in nodes]
    return [(node, sharding.map_prefix(path, node)) for path, node in nodes]


def lay_out(shardings: Sequence[Any], args: Sequence[Any]) -> None:
    """Constrains the nnx.Variables in arguments to the shardings of an `nnx.StateSharding`.

    Args:
      shardings: the shardings of the arguments.
      args: the arguments that are not static, as the traced function has left them.
    """

    def constrained(value: Any, sharding: Any) -> Any:
        if sharding is None or not isinstance(value, jax.Array):
            return value
        return jax.lax.with_sharding_constraint(value, sharding)  # type: ignore[no-untyped-call]

    def of_part(sharding: Any, part: Any) -> None:
        for node, of_node in (
            _shardings_of_variables(sharding, part) if _is_mapping(sharding) else ()
        ):
            lay = functools.partial(constrained, sharding=of_node)
            node.set_raw_value(jax.tree.map(lay, node.get_raw_value()))

    if has_mapping(shardings):
        jax.tree.map(of_part, shardings, tuple(args[: len(shardings)]), is_leaf=_is_sharding)


def _is_sharding(node: object) -> bool:
    return node is None or _is_mapping(node)


def refuse_other_shardings(shardings: Sequence[Any], args: Sequence[Any]) -> None:
    """Raises ValueError if an nnx.Variable is in two arguments with different shardings.

    Args:
      args: the arguments that are not static.
    """
    if nnx() is None:
        return
    found: dict[int, tuple[int, Any]] = {}  # the first argument of each nnx.Variable, its sharding
    for i, (sharding, arg) in enumerate(zip(shardings, args, strict=False)):
        for node, of_node in _shardings_of_variables(sharding, arg):
            first, of_first = found.setdefault(id(node), (i, of_node))
            if of_first != of_node:
                raise ValueError(
                    f"Inconsistent aliasing: one {type(node).__name__} is in the arguments {first} "
                    f"and {i}, for which in_shardings has {of_first} and {of_node}. "
                    "Give both the same sharding, or pass a copy (nnx.clone) as one of them"
                )
