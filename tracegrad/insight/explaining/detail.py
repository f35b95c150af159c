"""How much of a graph the passes measure, and which operations they always measure.

Most gradients are healthy, and a few numbers show that. XLA fuses all operations that are not
measured, so that measuring few of them halves the time of the first call of `explain`. Where a NaN
or Inf began, only the runs of operations need be measured that make it or pass it on.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

from tracegrad import _jax
from tracegrad._jax.caches import of_program
from tracegrad.ir import Atom, CustomGradient, Graph, Literal, Node, Value, operations
from tracegrad.ir.program_keys import Structure

# Operations that may prepare a parameter for its use.
PREPARING = operations.VIEWS | {"convert_element_type"}


class Detail(enum.IntEnum):
    """What the passes measure beside the inputs, the results and the gradients."""

    FEW = 0  # the cotangents of `telling` operations
    BAD = 1  # also as `ALL`, in runs that return NaN or Inf
    ALL = 2  # every value and cotangent, and what each VJP gives to each operand


@of_program
def telling(graph: Graph) -> tuple[bool, ...]:
    """Returns for each node of a graph whether its cotangents are always measured.

    The cotangents of operations on inputs of the graph (on parameters) tell whether the gradient
    vanishes or explodes along layers, and those of scans, rectifiers and operations with effects
    tell whether and where the gradient gets there.
    """
    inputs: set[object] = {*graph.inputs, *graph.constants}
    found = []
    for node in graph.nodes:
        of_input = any(isinstance(v, Value) and v in inputs for v in node.inputs)
        if of_input and node.op in PREPARING:
            inputs.update(node.outputs)
        is_scan = node.primitive is _jax.SCAN
        found.append(of_input or is_scan or may_be_rectifier(node) or bool(node.effects))
    return tuple(found)


@of_program
def telling_inside(graph: Graph) -> Structure:
    """Returns a key that is equal for graphs with the same `telling` operations, at any depth."""
    regions = (r for node in graph.nodes for r in node.regions.values())
    return Structure((telling(graph), tuple(map(telling_inside, regions))))


def may_be_rectifier(node: Node) -> bool:
    """Whether a node is `relu` or a maximum, with at least two axes."""
    is_relu = isinstance(node, CustomGradient) and node.name == "relu"
    if not is_relu and node.op != "max":
        return False
    aval = node.outputs[0].aval
    return len(aval.shape) >= 2 and math.prod(aval.shape) > 0 and _jax.has_gradient(aval)


def bounds_of(graph: Graph, node: Node, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns the operands of a maximum that may be its lower bound: the operands that the program
    writes as a number; if there are none, all operands."""
    pairs = zip(node.inputs, operands, strict=False)
    return [x for value, x in pairs if _is_written(graph, value)] or operands


def _is_written(graph: Graph, value: Atom) -> bool:
    """Whether a value is a number in the program, or an array filled with one."""
    if isinstance(value, Literal):
        return True
    node = graph.producers.get(value)
    return node is not None and node.op == "broadcast_in_dim" and _is_written(graph, node.inputs[0])
