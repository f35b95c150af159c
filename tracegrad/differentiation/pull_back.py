"""The reverse pass: cotangents of a graph's outputs → cotangents of any of its values.

It asks JAX for each node's VJP, at the values that the node had, and has no derivative formula of
its own. Nothing is computed forward again but what a node's VJP itself needs, and that XLA drops
where it is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Literal, Node, Value
from tracegrad.lowering import Lowering
from tracegrad.lowering.evaluate import evaluate_node


def pull_back(
    graph: Graph,
    values: Mapping[Value, Any],
    cotangents: Mapping[Value, Any],
    wanted: Sequence[Value],
) -> list[Any]:
    """Pulls cotangents back through a graph.

    Args:
      graph: clean of control flow at its own level, as every graph: nodes in order.
      values: what each value of the graph was; the results of nodes may be left out where no VJP
        needs them.
      cotangents: of any values of the graph, each of its value's shape and dtype.
      wanted: the values whose cotangents are asked for.

    Returns:
      For each wanted value its cotangent, or None if nothing connects it to a value that has one.
    """
    found = dict(cotangents)
    reached = _reached(graph, wanted)
    # A wanted value in the middle keeps what has arrived there, though its producer takes it too.
    for node in reversed(graph.nodes):
        given = [found.get(value) for value in node.outputs]
        if all(ct is None for ct in given):
            continue
        # What a custom rule closes over comes first, and gets nothing from the rule.
        first = node.params.get("num_consts", 0) if isinstance(node, CustomGradient) else 0
        inputs = list(enumerate(node.inputs))[first:]
        active = [i for i, v in inputs if isinstance(v, Value) and v in reached]
        if not active:
            continue
        for i, ct in zip(active, _node_vjp(node, values, given, active), strict=True):
            value = node.inputs[i]
            assert isinstance(value, Value)
            if ct is not None:
                found[value] = ct if found.get(value) is None else jnp.add(found[value], ct)
    return [found.get(value) for value in wanted]


def _reached(graph: Graph, wanted: Sequence[Value]) -> set[Value]:
    """The values of a dtype that has cotangents to which data flows from a wanted one."""
    reached = {value for value in wanted if _jax.has_gradient(value.aval)}
    for node in graph.nodes:
        if any(isinstance(v, Value) and v in reached for v in node.inputs):
            reached.update(v for v in node.outputs if _jax.has_gradient(v.aval))
    return reached


def _node_vjp(
    node: Node, values: Mapping[Value, Any], cotangents: Sequence[Any], active: Sequence[int]
) -> list[Any]:
    """The cotangents of the active inputs of a node; None where there is none."""
    args = [v.value if isinstance(v, Literal) else values[v] for v in node.inputs]

    def bound(*chosen: Any) -> list[Any]:
        operands = list(args)
        for i, value in zip(active, chosen, strict=True):
            operands[i] = value
        return evaluate_node(node, operands, Lowering())

    _, vjp = jax.vjp(bound, *(args[i] for i in active))
    full = [
        _zero(value.aval) if ct is None else ct
        for value, ct in zip(node.outputs, cotangents, strict=True)
    ]
    return list(vjp(full))


def _zero(aval: Any) -> Any:
    if not _jax.has_gradient(aval):
        return _jax.no_cotangent(aval)
    return jnp.zeros(aval.shape, aval.dtype)
