"""What the options of `jax.jit` say of the arrays of a call: which are given away, and where each
lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad.tracing.graphs import function_name
from tracegrad.tracing.signatures import argument_names
from tracegrad.tracing.static import Call, StaticArguments
from tracegrad.variables.packed import Packed
from tracegrad.variables.statics import is_none, is_variable


def refuse_sharing(fun: Callable[..., Any], call: Call, donated: StaticArguments) -> None:
    """Raises ValueError for modules that share an array which is to be given away."""
    packed = [
        (i, arg) for i, arg in (*enumerate(call.args), *call.kwargs.items()) if type(arg) is Packed
    ]
    arrays = [array for _, arg in packed for array in arg.arrays if isinstance(array, jax.Array)]
    if len(set(map(id, arrays))) == len(arrays):
        return
    names = dict(enumerate(argument_names(fun, len(call.args))))
    places: dict[int, list[str]] = {}
    for where, arg in packed:
        for path, array in jax.tree_util.tree_leaves_with_path(arg):
            name = names.get(where, where)
            places.setdefault(id(array), []).append(f"{name}{jax.tree_util.keystr(path)}")
    by_position = donated.within(call.args)
    for where, arg in packed:
        if where not in by_position and where not in donated.names:
            continue
        for array in arg.arrays:
            shared = [f"`{place}`" for place in places[id(array)]]
            if len(shared) > 1:
                own = next(p for p in shared if p.startswith(f"`{names.get(where, where)}"))
                raise ValueError(
                    f"{function_name(fun)} donates {own}, and {' and '.join(shared)} are one "
                    "array: after the call nobody would have it. Copy it first, as by "
                    "`jax.tree.map(jnp.copy, nnx.state(model))`, or leave out the donation"
                )


def structure_of(argument: Any) -> Any:
    """The structure of a packed argument; None for an array."""
    return argument.structure if type(argument) is Packed else None


def shardings_of(shardings: Any, args: Sequence[Any]) -> Any:
    """The shardings that the user has said along the trees of arguments, for packed ones."""
    if not isinstance(shardings, tuple):
        return shardings
    return tuple(
        _along(prefix, arg)
        if type(arg) is Packed and not jax.tree_util.all_leaves([prefix])
        else prefix
        for prefix, arg in zip(shardings, args, strict=False)
    )


def _along(prefix: Any, packed: Packed) -> Packed:
    argument = packed.argument()
    whole = jax.tree.broadcast(prefix, argument, is_leaf=is_none)
    arrays, found = iter(packed.arrays), []
    array = next(arrays, None)
    for sharding, leaf in zip(
        jax.tree.leaves(whole, is_leaf=is_none),
        jax.tree.leaves(argument, is_leaf=is_variable),
        strict=True,
    ):
        if leaf is array:  # the others are no arrays
            found.append(sharding)
            array = next(arrays, None)
    return Packed(found, packed.structure)
