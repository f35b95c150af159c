"""Finds the operations that may be rectifiers; `explain` counts their units that are not active."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tracegrad import _jax
from tracegrad.ir import Atom, CustomGradient, Graph, Literal, Node


def may_be_rectifier(node: Node) -> bool:
    """Whether a node is `relu` or a maximum, with at least two axes."""
    is_relu = isinstance(node, CustomGradient) and node.name == "relu"
    if not is_relu and node.op != "max":
        return False
    aval = node.outputs[0].aval
    return len(aval.shape) >= 2 and math.prod(aval.shape) > 0 and _jax.has_gradient(aval)


def bounds_of(graph: Graph, node: Node, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns the operands of a maximum that may be its lower bound: those that the program writes
    as a number; if there are none, all operands."""
    pairs = zip(node.inputs, operands, strict=False)
    return [x for value, x in pairs if _is_written(graph, value)] or operands


def _is_written(graph: Graph, value: Atom) -> bool:
    """Whether a value is a number in the program, or an array filled with one."""
    if isinstance(value, Literal):
        return True
    node = graph.producers.get(value)
    return node is not None and node.op == "broadcast_in_dim" and _is_written(graph, node.inputs[0])
