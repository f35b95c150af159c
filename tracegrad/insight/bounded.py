"""Bounds the loops of a function, so that they end at points near one where they end.

A loop that runs three times at one point may run for ever at a nearby point: if it waits for a
number to be met exactly, or if its condition and its body take one array as two operands, and only
one of these is moved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.insight.bound_functions import bind_functions, bind_while
from tracegrad.ir import CustomGradient, Graph, Node, RegionNode
from tracegrad.ir.importer import graph_of
from tracegrad.ir.running import read, run_node, run_nodes

Function = Callable[[Sequence[Any]], list[Any]]

_MOST = 100_000  # iterations


def bounded(fun: Function, at: Sequence[Any]) -> Function:
    """Compiles a function of arrays; a `while` loop that runs more than 100,000 times is ended, and
    its results are NaN."""
    program = jax.make_jaxpr(fun)(list(at))
    if _jax.program_facts(program).primitives.isdisjoint(_jax.WHILES):
        return jax.jit(fun)
    return jax.jit(functools.partial(_run, graph_of(program)))


def _run(graph: Graph, args: Sequence[Any]) -> list[Any]:
    instead: dict[Node, Function] = {
        node: functools.partial(_run_regions, node)
        for node in graph.nodes
        if isinstance(node, RegionNode)
    }
    return read(graph.outputs, run_nodes(graph, args, instead=instead))


def _run_regions(node: RegionNode, args: Sequence[Any]) -> list[Any]:
    def function_of(name: str) -> Callable[..., list[Any]]:
        return lambda *args: _run(node.region(name), args)

    if node.has_references:
        return run_node(node, args)
    if isinstance(node, CustomGradient):
        return _run(node.primal, args)
    if node.primitive is _jax.JIT:
        return function_of("jaxpr")(*args)
    if node.primitive in _jax.WHILES:
        return bind_while(node, args, function_of, _MOST)
    results = bind_functions(node, args, function_of)
    return run_node(node, args) if results is None else results
