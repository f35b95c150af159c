"""Shardings in the options of `jax.jit` that are trees, as the arguments and results are.

An `nnx.StateSharding` determines the sharding of each nnx.Variable in a module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from tracegrad.ir import Graph
from tracegrad.tracing.arguments import StaticArguments
from tracegrad.variables.modules import Again, Snapshot, Update
from tracegrad.variables.nnx_objects import is_variable_of_nnx, keys_of_path
from tracegrad.variables.packed import Packed
from tracegrad.variables.statics import is_variable


def structure_of(argument: Any) -> Any:
    """Returns the structure of a packed argument; None for an array."""
    return argument.structure if type(argument) is Packed else None


def of_jit(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options without an `nnx.StateSharding`, which `jax.jit` does not know."""
    shardings, of_result = options.get("in_shardings"), options.get("out_shardings")
    if maps(of_result):  # see `shardings_of_result`
        options = {**options, "out_shardings": None}
    if maps(shardings):
        plain = jax.tree.map(
            lambda x: None if _is_mapping(x) else x, shardings, is_leaf=_is_sharding
        )
        options = {**options, "in_shardings": plain}
    return options


def _is_mapping(sharding: object) -> bool:
    """Whether an object is an `nnx.StateSharding`."""
    return hasattr(sharding, "map_prefix")


def maps(shardings: Any) -> bool:
    """Whether shardings contain an `nnx.StateSharding`."""
    return any(map(_is_mapping, jax.tree.leaves(shardings, is_leaf=_is_sharding)))


def is_for_all(shardings: Any) -> bool:
    """Whether all arrays of a tree have the same sharding: `shardings` is one, or None."""
    if _is_mapping(shardings):
        return False
    return shardings is None or jax.tree_util.all_leaves([shardings])


def shardings_of_result(shardings: Any, graph: Graph) -> Packed | None:
    """Returns the shardings of a packed result, if one is an `nnx.StateSharding`; else None."""
    if not maps(shardings):
        return None
    arrays = graph.out_avals[: graph.result_count]
    return _along(shardings, Packed(arrays, graph.out_tree))


def shardings_of_arguments(shardings: Any, args: Sequence[Any]) -> Any:
    """Returns the user's shardings of arguments, as trees of the packed arguments."""
    if not isinstance(shardings, tuple):
        return shardings
    return tuple(
        _along(prefix, arg) if type(arg) is Packed and not is_for_all(prefix) else prefix
        for prefix, arg in zip(shardings, args, strict=False)
    )


def _along(prefix: Any, packed: Packed) -> Packed:
    """Returns the sharding of each array of an argument, from a prefix of its tree."""
    found: list[tuple[Any, Any]] = []  # pairs (sharding, leaf)

    def of_part(sharding: Any, part: Any) -> None:
        if not _is_mapping(sharding):
            found.extend((sharding, leaf) for leaf in jax.tree.leaves(part, is_leaf=is_variable))
            return
        for of_node, node in _mapped(sharding, part):
            found.extend((of_node, leaf) for leaf in jax.tree.leaves(node))

    jax.tree.map(of_part, prefix, packed.argument(), is_leaf=_is_sharding)
    return Packed(packed.of_arrays(found), packed.structure)


def _mapped(sharding: Any, part: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (sharding, node) for the nnx.Variables and the other leaves of a tree; other leaves
    have None."""
    for path, node in jax.tree_util.tree_leaves_with_path(part, is_leaf=is_variable_of_nnx):
        is_variable_there = is_variable_of_nnx(node)
        yield sharding.map_prefix(keys_of_path(path), node) if is_variable_there else None, node


def constrained(
    updates: Sequence[Update], values: Sequence[Any], shardings: Any, args: Sequence[Any]
) -> list[Any]:
    """Returns the new arrays of modules, constrained to the shardings of the arguments.

    Args:
      shardings: the shardings of the arguments.
      args: the packed arguments that are not static.
    """
    if not updates or not maps(shardings) or not isinstance(shardings, tuple):
        return list(values)
    trees = [arg.argument() if type(arg) is Packed else arg for arg in args]
    of_objects: dict[int, Any] = {}

    def of_part(sharding: Any, part: Any) -> None:
        if _is_mapping(sharding):
            of_objects.update((id(node), of_node) for of_node, node in _mapped(sharding, part))

    jax.tree.map(of_part, shardings, tuple(trees[: len(shardings)]), is_leaf=_is_sharding)
    objects = Snapshot(trees).objects
    laid_out = [of_objects.get(id(objects[update.place])) for update in updates]
    return [
        value if sharding is None else jax.lax.with_sharding_constraint(value, sharding)  # type: ignore[no-untyped-call]
        for value, sharding in zip(values, laid_out, strict=True)
    ]


def _is_sharding(node: object) -> bool:
    return node is None or _is_mapping(node)


def refuse_other_shardings(shardings: Any, args: Sequence[Any]) -> None:
    """Raises ValueError if an object of flax.nnx is in two arguments with different shardings.

    Args:
      args: the packed arguments that are not static.
    """
    if not isinstance(shardings, tuple):
        return
    owners: list[int] = []  # for each object, the index of its first argument
    for i, arg in enumerate(args[: len(shardings)]):
        if type(arg) is not Packed:
            continue
        for place in _places_again(arg.structure):
            first = owners[place] if place < len(owners) else i
            if shardings[first] != shardings[i]:
                raise ValueError(
                    f"Inconsistent aliasing: an object of flax.nnx is in the arguments {first} and "
                    f"{i}, for which in_shardings has {shardings[first]} and {shardings[i]}. "
                    "Give both the same sharding, or pass a copy (nnx.clone) as one of them"
                )
        owners += [i] * len(Snapshot(arg.argument()).objects)


def _places_again(structure: Any) -> Iterator[int]:
    node = structure.node_data()
    if node is not None and node[0] is Again:
        yield node[1].place
    elif node is not None:
        for child in structure.children():
            yield from _places_again(child)


def moved(shardings: Any, static: StaticArguments, count: int) -> frozenset[int]:
    """Returns the positions of the arguments whose shardings contain an `nnx.StateSharding`: all
    arrays of their modules are outputs, changed or not."""
    parts = shardings if isinstance(shardings, tuple) else ()
    dynamic = [i for i in range(count) if i not in static.positions]
    return frozenset(i for i, part in zip(dynamic, parts, strict=False) if maps(part))
