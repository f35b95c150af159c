"""Which arrays of modules of flax.nnx among the arguments of a call are donated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tracegrad.tracing.graphs import argument_names, function_name
from tracegrad.tracing.static import StaticArguments, resolve
from tracegrad.variables.modules import array_places, held_arrays, held_paths


def donated_places(
    fun: Callable[..., Any],
    options: Mapping[str, Any],
    static: StaticArguments,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[int]:
    """Their places among all arrays of modules.

    `options`: of `jax.jit`, for the function.
    """
    donated = resolve(fun, options.get("donate_argnums"), options.get("donate_argnames"))
    by_position = donated.within(args)
    _, fixed, _ = static.apart(args, kwargs)
    arguments = [(i in by_position, arg) for i, arg in enumerate(args) if i not in fixed]
    arguments += [(name in donated.names, kwargs[name]) for name in sorted(kwargs)]
    places: list[int] = []
    start = 0
    for is_donated, argument in arguments:
        end = start + len(array_places(argument))
        places += range(start, end) if is_donated else ()
        start = end
    return places


def refuse_sharing(
    fun: Callable[..., Any],
    options: Mapping[str, Any],
    static: StaticArguments,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raises for modules that share an array which is to be given away."""
    arrays = held_arrays((args, kwargs))
    if len(set(map(id, arrays))) == len(arrays):
        return
    names = [*argument_names(fun, len(args)), *sorted(kwargs)]
    arguments = [*args, *(kwargs[name] for name in sorted(kwargs))]
    paths = [
        f"`{name}{path}`"
        for name, argument in zip(names, arguments, strict=True)
        for path in held_paths(argument)
    ]
    for i in donated_places(fun, options, static, args, kwargs):
        shared = [path for path, other in zip(paths, arrays, strict=True) if other is arrays[i]]
        if len(shared) > 1:
            raise ValueError(
                f"{function_name(fun)} donates {paths[i]}, and {' and '.join(shared)} are one "
                "array: after the call nobody would have it. Copy it first, as by "
                "`jax.tree.map(jnp.copy, nnx.state(model))`, or leave out the donation"
            )
