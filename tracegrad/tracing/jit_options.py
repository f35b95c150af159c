"""The user's options of `jax.jit` for a program that takes values of Variables before arguments."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tracegrad.tracing.arguments import StaticArguments, donated_by
from tracegrad.tracing.signatures import parameters_of, positional
from tracegrad.variables.lending import peek
from tracegrad.variables.variable import Variable

if TYPE_CHECKING:
    from tracegrad.tracing.pipeline import Pipeline


def options_behind(
    pipeline: Pipeline,
    options: dict[str, Any],
    refs: Sequence[weakref.ref[Variable]],
    argument_count: int,
) -> dict[str, Any]:
    """Returns the options for a program that takes the values of `refs` before the arguments. Adds
    shardings for the values if the user gave some.

    `argument_count`: the number of positional arguments that are not static."""
    options = _shift(options, pipeline.static, pipeline.donated, len(refs), argument_count)
    of_arguments = options.get("in_shardings")
    if of_arguments is not None:
        variables: list[Any] = [ref() for ref in refs]
        of_values = [value.sharding if value.committed else None for value in peek(variables)]
        options = {**options, "in_shardings": (*of_values, *of_arguments)}
    if options.get("out_shardings") is not None:
        options = {**options, "out_shardings": (None, options["out_shardings"])}
    return options


def options_behind_module(
    module: Callable[..., Any],
    called: Callable[..., Any],
    options: dict[str, Any],
    static: StaticArguments,
) -> tuple[dict[str, Any], StaticArguments]:
    """Returns the options and the static arguments for `called`, which takes the module before the
    module's arguments."""
    names = tuple([parameter.name for parameter in positional(parameters_of(called))])
    static = static._replace(parameters=names)
    if not options:
        return options, static
    argument_count = len(inspect.signature(module).parameters) - len(static.names)
    options = _shift(options, static, donated_by(module, options), 1, argument_count)
    if options.get("in_shardings") is not None:
        options["in_shardings"] = (None, *options["in_shardings"])
    return options, static._replace(positions=frozenset(options["static_argnums"]))


def _shift(
    options: dict[str, Any],
    static: StaticArguments,
    donated: StaticArguments,
    count: int,
    argument_count: int,
) -> dict[str, Any]:
    """Shifts the positions in the options for a function with `count` more arguments in front."""
    shifted = dict(options)
    for option, arguments in (("static", static), ("donate", donated)):
        positions = [p + count if p >= 0 else p for p in sorted(arguments.positions)]
        shifted[f"{option}_argnums"] = tuple(positions)
        shifted[f"{option}_argnames"] = tuple(sorted(arguments.names))
    shardings = options.get("in_shardings")
    if shardings is not None and not isinstance(shardings, tuple):
        shifted["in_shardings"] = (shardings,) * argument_count
    return shifted


def signature_behind(
    fun: Callable[..., Any], variables: Sequence[weakref.ref[Variable]]
) -> inspect.Signature | None:
    """Returns the function's signature after one parameter for each Variable; None if the function
    has no signature."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return None
    kind = inspect.Parameter.POSITIONAL_ONLY
    front = [inspect.Parameter(f"tracegrad_variable_{i}", kind) for i in range(len(variables))]
    return signature.replace(parameters=[*front, *signature.parameters.values()])
