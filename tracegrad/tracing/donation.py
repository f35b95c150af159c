"""Refuses calls that donate an array which several modules of flax.nnx share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tracegrad.ir.paths import path_name
from tracegrad.tracing.arguments import PackedCall, StaticArguments
from tracegrad.tracing.graphs import function_name
from tracegrad.tracing.packed import Packed


def refuse_sharing(fun: Callable[..., Any], call: PackedCall, donated: StaticArguments) -> None:
    """Raises ValueError if modules share an array that the call donates."""
    packed = [(name, arg) for name, arg in call.by_name[0] if type(arg) is Packed]
    arrays = [array for _, arg in packed for array in arg.arrays if isinstance(array, jax.Array)]
    if len(set(map(id, arrays))) == len(arrays):
        return
    places: dict[int, list[str]] = {}
    for name, arg in packed:
        for path, array in jax.tree_util.tree_leaves_with_path(arg):
            places.setdefault(id(array), []).append(f"`{path_name(path, name)}`")
    given_away = donated.chosen(call.args, call.kwargs)
    for name, arg in packed:
        for array in arg.arrays if any(arg is each for each in given_away) else ():
            shared = places[id(array)]
            if len(shared) > 1:
                own = next(place for place in shared if place.startswith(f"`{name}"))
                raise ValueError(
                    f"{function_name(fun)} donates {own}, and {' and '.join(shared)} are one "
                    "array, which would be deleted by the call. Copy it first, for example by "
                    "`jax.tree.map(jnp.copy, nnx.state(model))`, or do not donate it"
                )
