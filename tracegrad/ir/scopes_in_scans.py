"""Puts a named scope around each operation in the bodies of scans.

When JAX differentiates a `scan`, it moves the operations that are the same at each step out of the
scan (for example, operations that quantise the weights of a recurrent layer). A moved operation
keeps the scopes that it has in the body, and loses the scopes around the scan.
"""

from __future__ import annotations

import functools

from tracegrad import _jax
from tracegrad.ir.borders import Edited, why_not_widened, with_regions
from tracegrad.ir.graph import Graph
from tracegrad.ir.nodes import Node
from tracegrad.ir.writing import Surroundings


def add_scope_in_scans(graph: Graph, name: str) -> Graph:
    """Puts the scope `name` around each operation in the body of a scan."""

    @functools.cache  # a region that several nodes call is edit_region once, and stays one region
    def edit_region(region: Graph, is_in_scan: bool) -> Graph:
        if not is_in_scan and _jax.SCAN not in _jax.program_facts(region.program).primitives:
            return region
        return region.replace(nodes=[edit_node(node, is_in_scan) for node in region.nodes])

    def edit_node(node: Node, is_in_scan: bool) -> Node:
        """Adds the scope in the bodies inner the node, and to the node if it is in a scan."""
        if why_not_widened(node) is None or node.primitive in _jax.WHILES:
            inner = is_in_scan or node.primitive is _jax.SCAN
            regions = {place: edit_region(region, inner) for place, region in node.regions.items()}
            edits = {k: Edited(new) for k, new in regions.items() if new is not node.regions[k]}
            if edits:
                (node,) = with_regions(node, edits, Surroundings()).nodes
        if not is_in_scan:
            return node
        info = _jax.inside_scope(name, node.equation.source_info)
        return node.having(node.equation.replace(source_info=info))

    return edit_region(graph, False)
