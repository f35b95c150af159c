"""Which arrays of modules of flax.nnx among the arguments of a call are donated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tracegrad.tracing.graphs import function_name
from tracegrad.tracing.signatures import argument_names
from tracegrad.tracing.static import StaticArguments, resolve
from tracegrad.variables.modules import held_arrays, held_leaves


class Donation(NamedTuple):
    """Which arguments of a function are donated; `static`: those that JAX does not see."""

    donated: StaticArguments
    static: StaticArguments

    def places(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Those of donated arrays among all arrays of modules."""
        by_position = self.donated.within(args)
        _, fixed, _ = self.static.apart(args, kwargs)
        arguments = [(i in by_position, arg) for i, arg in enumerate(args) if i not in fixed]
        arguments += [(name in self.donated.names, kwargs[name]) for name in sorted(kwargs)]
        places: list[int] = []
        start = 0
        for is_donated, argument in arguments:
            end = start + len(held_arrays(argument))
            places += range(start, end) if is_donated else ()
            start = end
        return places

    def refuse_sharing(
        self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
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
            for _, path in held_leaves(argument)
        ]
        for i in self.places(args, kwargs):
            shared = [path for path, other in zip(paths, arrays, strict=True) if other is arrays[i]]
            if len(shared) > 1:
                raise ValueError(
                    f"{function_name(fun)} donates {paths[i]}, and {' and '.join(shared)} are one "
                    "array: after the call nobody would have it. Copy it first, as by "
                    "`jax.tree.map(jnp.copy, nnx.state(model))`, or leave out the donation"
                )


def donation(
    fun: Callable[..., Any], options: Mapping[str, Any], static: StaticArguments
) -> Donation | None:
    """What the options of `jax.jit` for a function say of that; None if nothing is donated."""
    by_position, by_name = options.get("donate_argnums"), options.get("donate_argnames")
    if by_position is None and by_name is None:
        return None
    return Donation(resolve(fun, by_position, by_name), static)
