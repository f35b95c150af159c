"""How much of a graph the passes measure, and which operations they always measure.

Most gradients are healthy, and a few numbers show that. XLA fuses all operations that are not
measured, so that measuring few of them halves the time of the first call of `explain`. Where a NaN
or Inf began, only the runs of operations need be measured that make it or pass it on.
"""

from __future__ import annotations

import enum

from tracegrad import _jax
from tracegrad._jax.caches import of_program
from tracegrad.ir import Graph, Value, operations
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
    vanishes or explodes along layers, and those of scans and operations with effects tell whether
    the gradient gets there.
    """
    inputs: set[object] = {*graph.inputs, *graph.constants}
    found = []
    for node in graph.nodes:
        of_input = any(isinstance(v, Value) and v in inputs for v in node.inputs)
        if of_input and node.op in PREPARING:
            inputs.update(node.outputs)
        is_scan = node.primitive is _jax.SCAN
        found.append(of_input or is_scan or bool(node.effects))
    return tuple(found)


@of_program
def telling_inside(graph: Graph) -> Structure:
    """Returns a key that is equal for graphs with the same `telling` operations, at any depth."""
    regions = (r for node in graph.nodes for r in node.regions.values())
    return Structure((telling(graph), tuple(map(telling_inside, regions))))
