"""What a program is made of: a function, its gradients, and the value that these go with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.running import run_graph
from tracegrad.tracing.graphs import graph as trace_graph

Flat = Callable[..., list[Any]]


@dataclass(frozen=True)
class Source:
    """What a program is made of: a function of flat arrays.

    Attributes:
      name: what XLA calls it.
      avals: the types of its operands.
      fun: the function.
      count: how many of its results may have cotangents; behind them are new values of Variables.
      fresh: makes the same of new traces: a rule that JAX failed to differentiate JAX cannot
        differentiate again in the same program.
      above: what it is the gradient, or the value, of.
    """

    name: str
    avals: Sequence[Any]
    fun: Flat
    count: int
    fresh: Callable[[], Source]
    above: Source | None = None

    @functools.cached_property
    def graph(self) -> Graph:
        """Its Graph, traced once."""
        return trace_graph(self.fun, *self.avals)

    def gradient(self, operands: Sequence[int], results: Sequence[int]) -> Source:
        """From its operands and cotangents of `results`, the gradients of `operands`."""
        count, run = len(self.avals), _on_a_list(self.graph)

        def gradient(*given: Any) -> list[Any]:
            arguments, cotangents = given[:count], given[count:]
            return _jax.pull_back_of_some(run, arguments, operands, results, cotangents)

        avals = [self.graph.out_avals[j] for j in results]
        avals = [*self.avals, *(_jax.struct(aval.shape, aval.dtype) for aval in avals)]
        name = gradient.__name__ = gradient.__qualname__ = f"{self.name}_gradient"
        fresh = lambda: self.fresh().gradient(operands, results)  # noqa: E731
        return Source(name, avals, gradient, len(operands), fresh, self)

    def value(self, operands: Sequence[int]) -> Source:
        """What JAX computes in its place where it is differentiated."""
        run = _on_a_list(self.graph)

        def value(*given: Any) -> list[Any]:
            return list(_jax.vjp_of_some(run, given, operands)[0])

        value.__name__ = value.__qualname__ = self.name
        fresh = lambda: self.fresh().value(operands)  # noqa: E731
        return Source(self.name, self.avals, value, self.count, fresh, self)


def source_of(name: str, trace: Callable[[], Graph]) -> Source:
    """What a function is written from, whose Graph is made by `trace`."""
    graph = trace()
    fresh = functools.partial(source_of, name, trace)
    source = Source(name, graph.in_avals, run_of(graph), graph.result_count, fresh)
    vars(source)["graph"] = graph
    return source


def run_of(graph: Graph) -> Flat:
    """The function of flat arrays that a Graph is."""
    return lambda *operands: run_graph(graph, operands)


def _on_a_list(graph: Graph) -> Callable[[Sequence[Any]], list[Any]]:
    return functools.partial(run_graph, graph)
