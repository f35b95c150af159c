"""The same program with its jitted calls written out, so that a plan can cut inside them."""

from __future__ import annotations

from tracegrad import _jax
from tracegrad.ir import Call, Graph, Node
from tracegrad.lowering import has_jit_settings


def flatten(graph: Graph) -> Graph:
    """A copy of a graph whose calls of jitted functions are their nodes, at every depth.

    Calls with settings of their own (shardings, layouts, donated operands) stay as they are, and
    so do loops, branches, custom gradients and what is recomputed already.
    """
    flat = graph.copy()
    pending = [node for node in flat.nodes if _is_plain_call(node)]
    while pending:
        node = pending.pop()
        region = node.regions["jaxpr"]
        at = flat.nodes.index(node)
        flat.replace(node, region)
        pending += [n for n in flat.nodes[at : at + len(region.nodes)] if _is_plain_call(n)]
    return flat


def _is_plain_call(node: Node) -> bool:
    if not isinstance(node, Call) or node.primitive is not _jax.JIT or node.effects:
        return False
    return node.is_new or not has_jit_settings(node)
