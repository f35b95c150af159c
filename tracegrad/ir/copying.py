"""Copies of nodes: in a graph of their own, in another program's place, and on the way to an edit.

Regions are shared by a graph and its copies until one of them is edited: `own` copies those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracegrad.ir.body import leave
from tracegrad.ir.nodes import (
    CustomGradient,
    Literal,
    Node,
    RegionNode,
    Value,
    copied,
    set_field,
)
from tracegrad.ir.occurrence import Occurrence, written_out

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph


def copy(graph: Graph) -> Graph:
    """See `Graph.copy`."""
    new = type(graph)(graph.name, function_source=graph.function_source)
    new.in_tree, new.out_tree, new.signature = graph.in_tree, graph.out_tree, graph.signature
    new.variables, new.assigned, new.taps = graph.variables, graph.assigned, graph.taps
    new.updates, new.settings, new.loses = graph.updates, graph.settings, graph.loses
    new.surroundings, new.differentiated = graph.surroundings, graph.differentiated
    inputs = new.add_inputs(graph.in_avals, [value.hint for value in graph._inputs])
    nodes, outputs = written(graph, new, inputs)
    new.fill(nodes, outputs, graph._program, graph.closes_over)
    copies = dict(zip(graph.nodes, new.nodes, strict=True))
    new._copies.update(copies)
    new._copies.update((old, copies[now]) for old, now in graph._copies.items() if now in copies)
    return new


def written(
    graph: Graph, place: Graph, inputs: Sequence[Value | Literal], beside: Node | None = None
) -> tuple[list[Node], list[Value | Literal]]:
    """The nodes of a graph as nodes of another one, where they stand nowhere yet; and its outputs.

    `inputs`: what stands for its own. `beside`: the node whose line they have, unless they are
    what it calls; None: each its own.
    """
    is_call = isinstance(beside, RegionNode) and graph in beside.regions.values()
    values: dict[Value, Value | Literal] = dict(zip(graph._inputs, inputs, strict=True))
    for value, array in graph._constants.items():
        values[value] = place.add_constant(array, value.aval, value.hint)
    nodes = []
    for node in graph.nodes:
        new = copied(node, [values[v] if isinstance(v, Value) else v for v in node.inputs])
        if beside is not None and beside.source is not None:
            set_field(new, "source", written_out(beside, node) if is_call else beside.source)
        place.adopt(new, [value.aval for value in node.outputs])
        for old_value, new_value in zip(node.outputs, new.outputs, strict=True):
            new_value.hint = old_value.hint
            values[old_value] = new_value
        nodes.append(new)
    return nodes, [values[v] if isinstance(v, Value) else v for v in graph._outputs]


def own(graph: Graph, occurrence: Occurrence) -> Occurrence:
    """See `Graph.own`."""
    path: list[tuple[Node, str]] = []
    for step, name in occurrence.path:
        node = graph.node_here(step)
        assert isinstance(node, RegionNode)
        path.append((node, name))
        graph = _own_region(node, name)
    here = graph.node_here(occurrence.node)
    if isinstance(here, CustomGradient):  # its edit concerns all of them
        for name in tuple(here._regions):
            _own_region(here, name)
    return Occurrence(tuple(path), here)


def _own_region(node: RegionNode, name: str) -> Graph:
    region = node.region(name)
    if region.is_shared:  # the copy computes the same, so this is no edit yet
        new = node._regions[name] = copy(region)
        new.add_owner(node)
        leave(node, region)
        return new
    return region
