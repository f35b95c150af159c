"""Graph → JAX: every node bound in order, with the scope and source line that it came with.

A graph that nobody edited is bound from the program that it was imported from, save one in which a
`jax.custom_jvp` closes over a value (see `closed_over`). In an edited one each node is bound by
itself; a node whose regions are as they were keeps its parameters, so JAX sees the very sub-program
that it made; the others go to `regions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Literal, Node, Occurrence, RegionNode, Value
from tracegrad.ir.notes import add_note
from tracegrad.lowering import regions
from tracegrad.lowering.closed_over import refuse_derivatives

_NOTE = "while lowering"


@dataclass
class Lowering:
    """What one lowering remembers: the regions built so far.

    `rebuild`: build every region anew, even unedited ones (to test that building is exact).
    """

    rebuild: bool = False
    built: dict[tuple[Graph, Any], Any] = field(default_factory=dict)

    def keeps(self, graph: Graph) -> bool:
        """Whether the graph is bound from the program that it came from."""
        return graph.is_clean and not graph.closes_over and not self.rebuild


def evaluate(graph: Graph, args: Sequence[Any], lowering: Lowering | None = None) -> list[Any]:
    """Runs or traces a graph on flat arguments; returns its flat outputs."""
    lowering = lowering or Lowering()
    if len(args) < len(graph.inputs):
        raise TypeError(
            f"{graph.name} is given a part of a reference, ref.at[i], which is several arrays to "
            "JAX. Give it the reference and the index, and let it take the part"
        )
    if lowering.keeps(graph):
        return _jax.eval_program(graph.program, args)
    values = run_nodes(graph, args, lowering, freed=_last_uses(graph))
    return read(graph.outputs, values)


def run_nodes(
    graph: Graph,
    args: Sequence[Any],
    lowering: Lowering,
    *,
    instead: Mapping[Node, Callable[[list[Any]], Sequence[Any]]] = MappingProxyType({}),
    freed: Mapping[Node, Sequence[Value]] = MappingProxyType({}),
) -> dict[Value, Any]:
    """Runs the nodes of a graph in order; returns what its values are.

    Args:
      graph: whose inputs are `args`.
      lowering: what is remembered on the way.
      instead: for some nodes what gives their results, from their operands.
      freed: the values that are given up after a node.
    """
    values: dict[Value, Any] = dict(graph.constants)
    values.update(zip(graph.inputs, args, strict=True))
    for node in graph.nodes:
        operands = read(node.inputs, values)
        run = instead.get(node)
        results = evaluate_node(node, operands, lowering) if run is None else run(operands)
        values.update(zip(node.outputs, results, strict=True))
        for value in freed.get(node, ()):
            del values[value]
    return values


def read(wanted: Sequence[Value | Literal], values: Mapping[Value, Any]) -> list[Any]:
    """What some values are, and what literals say."""
    return [v.value if isinstance(v, Literal) else values[v] for v in wanted]


def evaluate_node(node: Node, args: Sequence[Any], lowering: Lowering | None = None) -> list[Any]:
    """The results of one node on `args`, under its own scope, source line and settings."""
    lowering = lowering or Lowering()
    assert node.source is not None
    try:
        scope, settings = _jax.equation_context(*node.source)
        with scope, settings:
            if not isinstance(node, RegionNode):
                return _jax.bind(node.primitive, args, node.params)
            if isinstance(node, CustomGradient):
                args = refuse_derivatives(node, args)
            unchanged = not (node.is_new or node.replaced)
            if unchanged and all(map(lowering.keeps, node._regions.values())):
                return _jax.bind(node.primitive, args, node.params)
            return regions.bind(node, list(args), lowering, evaluate)
    except Exception as error:
        # The innermost node only: a caller's node adds nothing that the traceback lacks.
        if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            add_note(error, f"{_NOTE} {Occurrence((), node)}")
        raise


def _last_uses(graph: Graph) -> dict[Node, list[Value]]:
    """Which values no later node needs, so that eager evaluation frees them as it goes."""
    kept = {value for value in graph.outputs if isinstance(value, Value)}
    last: dict[Value, Node] = {}
    for node in graph.nodes:
        for value in (*node.inputs, *node.outputs):
            if isinstance(value, Value) and value not in kept:
                last[value] = node
    freed: dict[Node, list[Value]] = {}
    for value, node in last.items():
        freed.setdefault(node, []).append(value)
    return freed
