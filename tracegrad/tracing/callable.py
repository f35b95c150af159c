"""Graph → a function with the signature of the one that was traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.engine import engine
from tracegrad.ir.wording import changes_lost
from tracegrad.lowering import Lowering, evaluate
from tracegrad.variables.inside import hands_out, put_together
from tracegrad.variables.modules import modules_in
from tracegrad.variables.trees import given


def to_callable(graph: Graph, *, rebuild: bool = False) -> Callable[..., Any]:
    """The function that a graph computes.

    Args:
      graph: from `tracegrad.graph` (called with the traced function's arguments), or a region
        (called with flat arguments, returns a list). Later edits of it are not seen by calls that
        JAX has cached, so make a new function after an edit.
      rebuild: build every region at every depth anew, even where nothing was edited. The result is
        the same program; the tests use it to show that.

    Returns:
      A function that runs under `jit`, `grad`, `vmap`, `jvp`, `scan`, `jax.export`, ... Called with
      other shapes or dtypes than the graph has, or with another tree, it raises TypeError.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        taps = kwargs.pop("taps", None) if graph.taps else None
        arguments: Any = args
        if graph.in_tree is None:
            flat = list(args)
        else:
            arguments, _ = given((args, kwargs))
            flat, tree = jax.tree.flatten(arguments)
            if tree != graph.in_tree:
                raise TypeError(
                    f"{graph.name} was traced for arguments of the structure {graph.in_tree}; "
                    f"it was called with {tree}"
                )
        values = [*flat, *(v.value for v in graph.variables), *_tap_values(graph, taps)]
        _check_types(graph, values)
        return _run(graph, arguments, values, Lowering(rebuild=rebuild))

    call.__name__ = call.__qualname__ = graph.name
    if graph.signature is not None:  # argument names, here and in what XLA prints
        call.__signature__ = graph.signature  # type: ignore[attr-defined]
    return call


def call_traced(graph: Graph, arguments: Any, dynamic: Any, taps: Any = None) -> Any:
    """Calls what a graph computes with the arguments that it was traced for.

    Args:
      arguments: of the call, as `given` makes them.
      dynamic: those of them that are not static.
    """
    flat = jax.tree.leaves(dynamic)
    values = [*flat, *(v.value for v in graph.variables), *_tap_values(graph, taps)]
    return _run(graph, arguments, values, Lowering())


def _run(graph: Graph, arguments: Any, values: list[Any], lowering: Lowering) -> Any:
    if graph.loses:
        raise TypeError(changes_lost(graph.name, graph.loses))
    outs = evaluate(graph, values, lowering)
    return outs if graph.out_tree is None else settle_call(graph, arguments, outs)


def settle_call(graph: Graph, arguments: Any, outs: Sequence[Any]) -> Any:
    """Assigns what a graph's run has given, behind the results, for Variables and modules; returns
    the result.

    `arguments`: of the call, as `given` makes them.
    """
    count = graph.result_count
    last = count + len(graph.assigned)
    for variable, value in zip(graph.assigned, outs[count:last], strict=True):
        variable.assign(value)
    result = jax.tree.unflatten(graph.out_tree, outs[:count])
    returns_modules = hands_out(graph.out_tree)
    if not graph.updates and not graph.settings and not returns_modules:
        return result
    modules = modules_in(arguments)
    if graph.updates or graph.settings:
        assert modules is not None, "the arguments are of the structure that was traced"
        modules.assign(graph.updates, outs[last : last + len(graph.updates)])
        modules.set(graph.settings)
    return put_together(result, modules) if returns_modules else result


def tap_zeros(graph: Graph) -> dict[str, dict[str, Any]]:
    """What a function with taps takes for ``taps``: by the tap's name and by its place, zeros."""
    zeros: dict[str, dict[str, Any]] = {}
    for tap in graph.taps:
        zeros.setdefault(tap.name, {})[tap.place] = jnp.zeros(tap.aval.shape, tap.aval.dtype)
    return zeros


def _tap_values(graph: Graph, taps: Any) -> list[Any]:
    if not graph.taps:
        return []
    values = tap_zeros(graph)
    if taps is not None:
        expected: Any = jax.tree.structure(values)
        given: Any = jax.tree.structure(taps)
        if given != expected:
            raise TypeError(
                f"the taps of {graph.name} are {expected}; it was called with {given}. Pass what "
                "its .taps(...) returns"
            )
        for tap in graph.taps:
            got = jax.typeof(taps[tap.name][tap.place])
            if (got.shape, got.dtype) != (tap.aval.shape, tap.aval.dtype):
                raise TypeError(
                    f"the tap {tap.name!r} of {graph.name} at {tap.place} is "
                    f"{_jax.type_text(tap.aval)}; it was called with {_jax.type_text(got)}. Pass "
                    "what its .taps(...) returns for the same arguments: under jax.vmap those of "
                    "one example, made inside of the mapped function"
                )
        values = taps
    return [values[tap.name][tap.place] for tap in graph.taps]


def _check_types(graph: Graph, args: list[Any]) -> None:
    if len(args) != len(graph.inputs):
        raise TypeError(f"{graph.name} takes {len(graph.inputs)} arrays, {len(args)} were given")
    for value, arg in zip(graph.inputs, args, strict=True):
        aval = jax.typeof(arg)
        given = (getattr(aval, "shape", None), getattr(aval, "dtype", None))
        if given != (getattr(value.aval, "shape", None), getattr(value.aval, "dtype", None)):
            raise TypeError(
                f"{graph.name} was traced for {value!r}; it was called with "
                f"{_jax.type_text(aval)} there. Trace it again for other types"
            )


engine.to_callable = to_callable
