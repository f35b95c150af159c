"""The pushforward of a graph: a program from the values and tangents of its inputs to the tangents
of its outputs.

JAX computes the JVP of the graph; the JVP of a custom gradient is the transpose of its backward.
The graph has already run: the pushforward computes its values again, but does not repeat its
effects (prints).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.dependence import dependence, spread_below
from tracegrad.ir.importer import graph_of
from tracegrad.ir.running import run_graph
from tracegrad.rewriting.forward_mode import with_forward_mode
from tracegrad.rewriting.host_calls import without_past_effects


class PushForward(NamedTuple):
    """The pushforward of a graph: a function to compile, and the dependences between the
    tangents."""

    run: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    """Takes the values of all inputs and a tangent for each active input; returns the tangents of
    the outputs that depend on a tangent."""
    linked: tuple[int, ...]
    """For every output, a mask of the active inputs on whose tangents the output's tangent depends;
    bit i stands for the i-th active input."""


def push_forward(graph: Graph, active: Sequence[int]) -> PushForward:
    """Returns the pushforward of a graph with respect to the inputs at the positions `active`,
    which have tangents and a float or complex dtype.

    Raises:
      ValueError: a custom gradient in the graph has no transpose.
      NotImplementedError: an operation with an effect has results as well (a call of the host), so
        that it would have to run again.
      Exception: whatever JAX raises for an operation that cannot be differentiated forward.
    """
    function = with_forward_mode(graph)

    def pushed(args: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        along = _jax.of_some(lambda operands: run_graph(function, operands), args, active)
        _, found = _jax.jvp(along, tuple(args[i] for i in active), tuple(tangents))
        return [t for t, out in zip(found, graph.out_avals, strict=True) if _jax.has_gradient(out)]

    types = [value.aval for value in graph.inputs]
    program = jax.make_jaxpr(pushed)(types, [types[i] for i in active])
    imported = graph_of(program)
    # An output is linked to an input if its tangent depends on the tangent of the input.
    linked = [mask >> len(types) for mask in dependence(imported)]
    run = jax.extend.core.jaxpr_as_fun(program)
    if imported.effects:
        flows = spread_below(imported, [int(i >= len(types)) for i in range(len(imported.inputs))])
        quiet = without_past_effects(imported, {value for value, mask in flows.items() if mask})
        run = lambda *operands: run_graph(quiet, operands)  # noqa: E731

    def linked_only(args: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        found = run(*args, *tangents)
        return [tangent for tangent, mask in zip(found, linked, strict=True) if mask]

    each = iter(linked)
    of_all = tuple(next(each) if _jax.has_gradient(out) else 0 for out in graph.out_avals)
    return PushForward(linked_only, of_all)
