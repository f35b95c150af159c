"""Checks that a graph is a valid program: its structure by rules of ours, and the types of each
operation's results by the operation's typing rule in JAX.

The tests call `Graph.verify()` after every rewrite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tracegrad import _jax
from tracegrad.ir.errors import GraphError
from tracegrad.ir.inlined import region_calls
from tracegrad.ir.nodes import Apply, CustomGradient, Node, Recompute, Value
from tracegrad.ir.occurrence import Occurrence, Path

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph


def verify(graph: Graph) -> None:
    """Raises GraphError, with the node and its source line, unless `graph` is a valid program."""
    _verify(graph, (), set())


def _verify(graph: Graph, path: Path, seen: set[Graph]) -> None:
    if graph in seen:
        return
    seen.add(graph)
    defined: set[Value] = set(graph.inputs) | set(graph.constants)
    if len(defined) != len(graph.inputs) + len(graph.constants):
        raise GraphError(f"{graph.name} lists an input or constant twice")
    for node in graph.nodes:
        try:
            _check_node(graph, node, defined)
        except GraphError as error:
            raise GraphError(f"{error}\n  at {Occurrence(path, node)}") from None
        defined.update(node.outputs)
        for name, region in node.regions.items():
            check: Callable[[], None] = functools.partial(
                _verify, region, (*path, (node, name)), seen
            )
            if node.op == "shard_map":
                check = _jax.in_mesh_of(node.params, check)
            check()
    for value in graph.outputs:
        if isinstance(value, Value) and value not in defined:
            kind = _jax.type_text(value.aval)
            raise GraphError(f"{graph.name} returns a {kind} that nothing in it defines")


def _check_node(graph: Graph, node: Node, defined: set[Value]) -> None:
    for value in node.operands:
        if value not in defined:
            where = "defined later" if value in graph.producers else "of another graph"
            kind = _jax.type_text(value.aval)
            raise GraphError(f"expected operands that are defined before; a {kind} is {where}")
    for value in node.outputs:
        if value in defined:
            raise GraphError(f"{graph.names[value]} is defined twice")
    if isinstance(node, Apply):
        _check_types(node)
    _check_operands(node)
    if isinstance(node, (Recompute, CustomGradient)) or node.op == "jit":
        (region,) = node.regions.values()
        _expect_types("results", [v.aval for v in node.outputs], region.out_avals)


def _check_types(node: Node) -> None:
    avals = [value.aval for value in node.inputs]
    scope, settings = _jax.equation_context(*node.source)
    with scope, settings:
        try:
            expected = _jax.abstract_eval(node.primitive, avals, node.params)
        except Exception as error:
            raise GraphError(f"{node.op} does not take {_types_text(avals)}: {error}") from error
    if expected is not None:
        _expect_types("results", [v.aval for v in node.outputs], expected)


def _check_operands(node: Node) -> None:
    avals = [value.aval for value in node.inputs]
    if node.op == "shard_map":  # passes shards of its operands
        return
    for call in region_calls(node):
        given = [avals[i] for i in call.operands]
        whole = len(given) - call.sliced
        given[whole:] = [aval.update(shape=aval.shape[1:]) for aval in given[whole:]]
        _expect_types(f"operands of {call.name}", given, node.region(call.name).in_avals)


def _expect_types(what: str, given: Sequence[Any], expected: Sequence[Any]) -> None:
    if len(given) != len(expected):
        raise GraphError(f"expected {len(expected)} {what}, found {len(given)}")
    for i, (a, b) in enumerate(zip(given, expected, strict=True)):
        if (getattr(a, "shape", None), getattr(a, "dtype", None)) != (
            getattr(b, "shape", None),
            getattr(b, "dtype", None),
        ):
            raise GraphError(
                f"{what}: expected {_jax.type_text(b)} at position {i}, found {_jax.type_text(a)}"
            )


def _types_text(avals: Sequence[Any]) -> str:
    return ", ".join(map(_jax.type_text, avals))
