"""What a program is made of: a function, its gradients, and the value that these go with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
      trace: makes its Graph. Asked for a `fresh` one it traces anew all that leads there: a rule
        that JAX failed to differentiate JAX cannot differentiate again in the same program.
      count: how many of its results may have cotangents; behind them are new values of Variables.
      above: what it is the gradient, or the value, of.
    """

    name: str
    avals: Sequence[Any]
    fun: Flat
    trace: Callable[[bool], Graph]
    count: int
    above: Source | None = None

    @functools.cached_property
    def graph(self) -> Graph:
        """Its Graph, traced once."""
        return self.trace(False)

    def fresh(self) -> Source:
        """The same, of new traces."""
        graph, trace = self.trace(True), self.trace
        return replace(
            self, fun=run_of(graph), trace=lambda is_fresh: trace(True) if is_fresh else graph
        )

    def gradient(self, operands: Sequence[int], results: Sequence[int]) -> Source:
        """From its operands and cotangents of `results`, the gradients of `operands`."""
        count = len(self.avals)

        def of(graph: Graph) -> Flat:
            def gradient(*given: Any) -> list[Any]:
                run = functools.partial(evaluate, graph)
                arguments, cotangents = given[:count], given[count:]
                return _jax.pull_back_of_some(run, arguments, operands, results, cotangents)

            gradient.__name__ = gradient.__qualname__ = f"{self.name}_gradient"
            return gradient

        return self._below(of, [self.graph.out_avals[j] for j in results], len(operands))

    def value(self, operands: Sequence[int]) -> Source:
        """What JAX computes in its place where it is differentiated."""

        def of(graph: Graph) -> Flat:
            def value(*given: Any) -> list[Any]:
                run = functools.partial(run_graph, graph)
                return list(_jax.vjp_of_some(run, given, operands)[0])

            value.__name__ = value.__qualname__ = self.name
            return value

        return self._below(of, [], self.count)

    def _below(self, of: Callable[[Graph], Flat], more: Sequence[Any], count: int) -> Source:
        avals = [*self.avals, *(_jax.struct(aval.shape, aval.dtype) for aval in more)]

        def trace(is_fresh: bool) -> Graph:
            return trace_graph(of(self.trace(True) if is_fresh else self.graph))(*avals)

        fun = of(self.graph)
        return Source(fun.__name__, avals, fun, trace, count, above=self)


def run_of(graph: Graph) -> Flat:
    """The function of flat arrays that a Graph is."""

    def run(*operands: Any) -> list[Any]:
        return run_graph(graph, operands)

    return run
