"""Runs a graph: as a whole, or node by node if intermediate values are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracegrad import _jax
from tracegrad.ir.closed_over import refuse_derivatives
from tracegrad.ir.editing import Op, around_each
from tracegrad.ir.graph import Graph
from tracegrad.ir.importer import graph_of
from tracegrad.ir.nodes import Atom, CustomGradient, Node, RegionNode, Value
from tracegrad.ir.notes import add_note
from tracegrad.ir.occurrence import Occurrence

_NOTE = "while running"


def run_graph(graph: Graph, args: Sequence[Any], *, as_call: bool = False) -> list[Any]:
    """Runs or traces a graph on flat arguments; returns its flat outputs. If a `jax.custom_jvp`
    closes over a value, differentiating with respect to the value raises ValueError. With
    `as_call`, uses `Graph.as_call`."""
    if graph.closes_over:
        closing = [found for found in graph.walk() if _closes_over(found)]
        graph = around_each(graph, closing, _run_refusing_derivatives).graph
    return graph.as_call(*args) if as_call else graph(*args)


def _closes_over(found: Occurrence) -> bool:
    node = found.node
    return isinstance(node, CustomGradient) and node.closes_over and found.rule_around is None


def _run_refusing_derivatives(op: Op, *operands: Any) -> list[Any]:
    (node,) = op.nodes
    assert isinstance(node, CustomGradient)
    return op.results(*refuse_derivatives(node, operands))


def run_nodes(
    graph: Graph, args: Sequence[Any], run: Callable[[Node, list[Any]], Sequence[Any]]
) -> dict[Value, Any]:
    """Runs the nodes of a graph in order by ``run(node, operands)``; returns arrays for all values
    of the graph. `args` are the arrays for its inputs."""
    values: dict[Value, Any] = dict(graph.constants)
    values.update(zip(graph.inputs, args, strict=True))
    for node in graph.nodes:
        results = run(node, read(node.inputs, values))
        values.update(zip(node.outputs, results, strict=True))
    return values


def read(wanted: Sequence[Atom], values: Mapping[Value, Any]) -> list[Any]:
    """Literals give their numbers."""
    return [values[atom] if isinstance(atom, Value) else atom.val for atom in wanted]


def run_node(node: Node, args: Sequence[Any]) -> list[Any]:
    """Under the node's own scope, source line and settings."""
    scope, settings = _jax.equation_context(*node.source)
    try:
        with scope, settings:
            if isinstance(node, CustomGradient):
                args = refuse_derivatives(node, args)
            elif isinstance(node, RegionNode) and node.closes_over:
                program = _jax.program_of_one(node.primitive, node.params, args)
                return run_graph(graph_of(program), args)
            return _jax.bind(node.primitive, args, node.params)
    except Exception as error:
        # The innermost node only: a caller's node adds nothing that the traceback lacks.
        if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            add_note(error, f"{_NOTE} {Occurrence((), node)}")
        raise
