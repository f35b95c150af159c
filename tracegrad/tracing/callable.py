"""Graph → a function with the signature of the traced function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.ir.running import run_graph
from tracegrad.ir.text import value_text
from tracegrad.ir.wording import changes_lost
from tracegrad.tracing.arguments import CallPacker, PackedCall
from tracegrad.tracing.packed import finish_result, has_nnx_objects


def to_callable(graph: Graph) -> Callable[..., Any]:
    """Returns the function that a graph computes.

    Args:
      graph: from `tracegrad.graph` (then the function takes the traced function's arguments), or a
        region (then the function takes flat arguments and returns a list).

    Returns:
      A function that runs under `jit`, `grad`, `vmap`, `jvp`, `scan`, `jax.export`, ... It raises
      TypeError if the shapes, the dtypes or the tree of its arguments differ from the graph's.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if graph.in_tree is None:
            values = list(args)
            _check_argument_types(graph, values)
            return run_graph(graph, values)
        packed = CallPacker()(args, kwargs)
        flat, tree = jax.tree.flatten(packed.dynamic)
        if tree != graph.in_tree:
            raise TypeError(
                f"{graph.name} was traced for arguments of the structure {graph.in_tree}; "
                f"it was called with {tree}"
            )
        _check_argument_types(graph, flat)
        return call_traced(graph, packed)

    call.__name__ = call.__qualname__ = graph.name
    if graph.signature is not None:  # for argument names, here and in XLA's output
        call.__signature__ = graph.signature  # type: ignore[attr-defined]
    return call


def call_traced(graph: Graph, call: PackedCall) -> Any:
    """Runs a graph with the arguments of the call that it was traced for."""
    values = [*jax.tree.leaves(call.dynamic), *(v.value for v in graph.variables)]
    if graph.loses:
        warn_where_called(changes_lost(graph.name, graph.loses), UserWarning)
    return finish_call(graph, call, run_graph(graph, values))


def finish_call(graph: Graph, call: PackedCall, outs: Sequence[Any]) -> Any:
    """Assigns the outputs after the results to Variables and modules; returns the user's result."""
    count = graph.result_count
    last = count + len(graph.assigned)
    for variable, value in zip(graph.assigned, outs[count:last], strict=True):
        variable.assign(value)
    end = last + len(graph.updates)
    result = jax.tree.unflatten(graph.out_tree, outs[:count])
    has_objects = has_nnx_objects(graph.out_tree)
    return finish_result(
        result, call.objects, graph.updates, outs[last:end], has_objects=has_objects
    )


def _check_argument_types(graph: Graph, args: list[Any]) -> None:
    count = len(graph.inputs) - len(graph.variables)
    if len(args) != count:
        raise TypeError(f"{graph.name} takes {count} arrays, {len(args)} were given")
    for value, arg in zip(graph.inputs, args):
        aval = jax.typeof(arg)
        given = (getattr(aval, "shape", None), getattr(aval, "dtype", None))
        if given != (getattr(value.aval, "shape", None), getattr(value.aval, "dtype", None)):
            raise TypeError(
                f"{graph.name} was traced for {value_text(graph, value)}; it was called with "
                f"{_jax.type_text(aval)} there. Trace it again for other types"
            )
