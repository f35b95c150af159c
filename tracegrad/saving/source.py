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

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Runs its Graph."""
        return run_graph(self.graph, operands)

    def gradient(self, operands: Sequence[int], results: Sequence[int]) -> Source:
        """From its operands and cotangents of `results`, the gradients of `operands`."""
        count = len(self.avals)

        def gradient(*given: Any) -> list[Any]:
            arguments, cotangents = given[:count], given[count:]
            return _jax.pull_back_of_some(self.run, arguments, operands, results, cotangents)

        def fresh() -> Source:
            return self.fresh().gradient(operands, results)

        flowing = [self.graph.out_avals[j] for j in results]
        avals = [*self.avals, *(_jax.struct(aval.shape, aval.dtype) for aval in flowing)]
        gradient.__name__ = name = f"{self.name}_gradient"
        return Source(name, avals, gradient, len(operands), fresh, self)

    def value(self, operands: Sequence[int]) -> Source:
        """What JAX computes in its place where it is differentiated."""

        def value(*given: Any) -> list[Any]:
            return list(_jax.vjp_of_some(self.run, given, operands)[0])

        def fresh() -> Source:
            return self.fresh().value(operands)

        value.__name__ = self.name
        return Source(self.name, self.avals, value, self.count, fresh, self)


def source_of(name: str, trace: Callable[[], Graph]) -> Source:
    """What a function is written from, whose Graph is made by `trace`."""
    graph = trace()
    fresh = functools.partial(source_of, name, trace)
    run = lambda *operands: run_graph(graph, operands)  # noqa: E731
    source = Source(name, graph.in_avals, run, graph.result_count, fresh)
    vars(source)["graph"] = graph
    return source
