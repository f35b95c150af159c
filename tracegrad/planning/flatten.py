"""The same program with its jitted calls written out, so that a plan can cut inside them."""

from __future__ import annotations

from tracegrad import _jax
from tracegrad.ir import Call, Graph, Literal, Node, Value


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
        results = flat.insert(region, node.inputs, before=node)
        pending += [n for n in flat.nodes[at : at + len(region.nodes)] if _is_plain_call(n)]
        replace_values(flat, dict(zip(node.outputs, results, strict=True)))
        flat.erase(node)
    return flat


def _is_plain_call(node: Node) -> bool:
    if not isinstance(node, Call) or node.primitive is not _jax.JIT or node.effects:
        return False
    params = node.params
    if node.is_new:
        return True
    return not (
        any(params["donated_invars"])
        or any(
            "Unspecified" not in type(s).__name__
            for s in (*params["in_shardings"], *params["out_shardings"])
        )
        or any(x is not None for x in (*params["in_layouts"], *params["out_layouts"]))
    )


def replace_values(graph: Graph, new: dict[Value, Value | Literal]) -> None:
    """`Graph.replace_uses` of many values, none of which is computed from another."""
    for user in dict.fromkeys(user for old in new for user in old.users):
        graph.set_inputs(user, [new.get(v, v) if isinstance(v, Value) else v for v in user.inputs])
    if any(isinstance(v, Value) and v in new for v in graph.outputs):
        graph.set_outputs([new.get(v, v) if isinstance(v, Value) else v for v in graph.outputs])
