"""Puts a named scope around the operations in the bodies of scans, and not only around the scans.

When JAX differentiates a `scan`, it moves the operations that are the same at each step out of the
scan (the weights of a recurrent layer are quantised there, say). Outside, such an operation has the
scopes that it had in the body, and none of those around the scan.
"""

from __future__ import annotations

from tracegrad import _jax
from tracegrad.ir.borders import Edited, why_not_widened, with_regions
from tracegrad.ir.graph import Graph
from tracegrad.ir.nodes import Node
from tracegrad.ir.writing import Where


def in_scope_in_scans(graph: Graph, name: str, *, inside: bool = False) -> Graph:
    """Returns the graph with the scope `name` around each operation in the body of a scan.

    `inside`: whether the graph itself is in a scan.
    """
    nodes = [_in_scope(node, name, inside) for node in graph.nodes]
    is_same = all(new is old for new, old in zip(nodes, graph.nodes, strict=True))
    return graph if is_same else graph.replace(nodes=nodes)


def _in_scope(node: Node, name: str, inside: bool) -> Node:
    if why_not_widened(node) is None or node.primitive in _jax.WHILES:
        below = inside or node.primitive is _jax.SCAN
        edits = {
            place: Edited(edited)
            for place, region in node.regions.items()
            if (edited := in_scope_in_scans(region, name, inside=below)) is not region
        }
        if edits:
            (node,) = with_regions(node, edits, Where()).nodes
    if not inside:
        return node
    info = _jax.inside_scope(name, node.equation.source_info)
    return node.having(node.equation.replace(source_info=info))
