"""Puts a named scope around the operations in the bodies of scans, and not only around the scans.

When JAX differentiates a `scan`, it moves the operations that are the same at each step out of the
scan (for example, operations that quantise the weights of a recurrent layer). Outside, such an
operation has the scopes that it had in the body, and no scope that is around the scan.
"""

from __future__ import annotations

import functools

from tracegrad import _jax
from tracegrad.ir.borders import Edited, why_not_widened, with_regions
from tracegrad.ir.graph import Graph
from tracegrad.ir.nodes import Node
from tracegrad.ir.writing import Where


def in_scope_in_scans(graph: Graph, name: str) -> Graph:
    """Puts the scope `name` around each operation in the body of a scan."""

    @functools.cache  # a region that several nodes call is edited once, and stays one region
    def edited(region: Graph, inside: bool) -> Graph:
        if not inside and _jax.SCAN not in _jax.program_facts(region.program).primitives:
            return region
        return region.replace(nodes=[in_scope(node, inside) for node in region.nodes])

    def in_scope(node: Node, inside: bool) -> Node:
        """Returns the node; `inside`: whether it is in the body of a scan."""
        if why_not_widened(node) is None or node.primitive in _jax.WHILES:
            below = inside or node.primitive is _jax.SCAN
            regions = {place: edited(region, below) for place, region in node.regions.items()}
            edits = {k: Edited(new) for k, new in regions.items() if new is not node.regions[k]}
            if edits:
                (node,) = with_regions(node, edits, Where()).nodes
        if not inside:
            return node
        info = _jax.inside_scope(name, node.equation.source_info)
        return node.having(node.equation.replace(source_info=info))

    return edited(graph, False)
