"""The functions that are exported: a function, its gradients, and its forward pass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.notes import add_note
from tracegrad.ir.occurrence import line_of_error
from tracegrad.ir.running import run_graph
from tracegrad.saving.interface import (
    Function,
    check_leaves,
    parameters_of,
    parameters_text,
    positional,
    tree_of_types,
)
from tracegrad.tracing.graphs import graph as trace_graph
from tracegrad.tracing.graphs import graph_of_call

Flat = Callable[..., list[Any]]


@dataclass(frozen=True)
class ExportedFunction:
    """A function of flat arrays, from which a program is exported.

    Attributes:
      name: the name of the program for XLA.
      avals: the types of the operands.
      count: the number of results that may have cotangents; new values of Variables follow them.
      above: the function whose gradient or value this function computes; None for the saved
        function.
      arguments, result: of the saved function, the pytrees of types of its arguments, by the names
        of the parameters, and of its result.
    """

    name: str
    avals: Sequence[Any]
    fun: Flat
    count: int
    above: ExportedFunction | None = None
    traced: Graph | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    result: Any = None

    @functools.cached_property
    def graph(self) -> Graph:
        return self.traced or trace_graph(self.fun, *self.avals)

    def run(self, operands: Sequence[Any]) -> list[Any]:
        return run_graph(self.graph, operands)

    def gradient(self, operands: Sequence[int], results: Sequence[int]) -> ExportedFunction:
        """The gradient takes the operands of this function and the cotangents of `results`, and
        returns the gradients of `operands`."""
        count = len(self.avals)

        def gradient(*given: Any) -> list[Any]:
            arguments, cotangents = given[:count], given[count:]
            return _jax.pull_back_of_some(self.run, arguments, operands, results, cotangents)

        flowing = [self.graph.out_avals[j] for j in results]
        avals = [*self.avals, *(_jax.struct(aval.shape, aval.dtype) for aval in flowing)]
        gradient.__name__ = name = f"{self.name}_gradient"
        return ExportedFunction(name, avals, gradient, len(operands), self)

    def value(self, operands: Sequence[int]) -> ExportedFunction:
        """Its results are the results that JAX computes when it differentiates this function: for a
        custom rule, the results of the rule's forward pass."""

        def value(*given: Any) -> list[Any]:
            return list(_jax.vjp_of_some(self.run, given, operands)[0])

        value.__name__ = self.name
        return ExportedFunction(self.name, self.avals, value, self.count, self)


def trace_to_save(fun: Function, given: inspect.BoundArguments, name: str) -> ExportedFunction:
    """Traces a function for its specs. Raises TypeError if a result is not an array."""
    try:
        with _jax.tracing_apart("to be saved"):
            graph = graph_of_call(positional(fun, given), tuple(given.arguments.values()), {})
    except Exception as error:
        specs = parameters_text(parameters_of(given), jax.eval_shape(dict, given.arguments))
        text = f"while {name} was traced to be saved, for ({specs})"
        add_note(error, text, line_of_error(error.__traceback__))
        raise
    structure: Any = jax.tree.structure(tuple(given.arguments.values()))
    types = tree_of_types(structure, graph.in_avals[: structure.num_leaves])
    result = tree_of_types(graph.out_tree, graph.out_avals[: graph.result_count])
    check_leaves(result, f"the result of {name}")
    return ExportedFunction(
        name,
        graph.in_avals,
        lambda *operands: run_graph(graph, operands),
        graph.result_count,
        traced=graph,
        arguments=dict(zip(given.arguments, types, strict=True)),
        result=result,
    )
