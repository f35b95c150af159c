"""Finds constants that a program adds to a linear function of some of its inputs.

A derivative does not show such a constant: the gradient function ``lambda dy: dy + 1``, or a
function that ignores ``dy``, would seem to be linear. A value counts as zero if it is a zero in the
program's text, or if the program computes it from such zeros in a way that must give zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag
from typing import Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad.ir import Graph, Literal, Node, operations
from tracegrad.ir.dependence import Masks, Run, data_flow, enter, joined, spread


class TermKinds(IntFlag):
    """The terms of a value: a constant, a linear function of the inputs marked LINEAR, or both.

    The mask is propagated through a program like the masks of `dependence`.
    """

    ZERO = 0
    CONSTANT = 1
    LINEAR = 2


def adds_constant(graph: Graph, inputs: Sequence[TermKinds]) -> bool:
    """Whether a graph adds a constant to a linear function of its linear inputs, or returns one."""
    added: list[Node] = []
    outs = _part_propagator(added)(graph, list(inputs))
    return bool(added) or TermKinds.CONSTANT in outs


def zero_outputs(graph: Graph) -> list[bool]:
    """For each output of a graph, whether it is zero by structure."""
    return [
        mask == TermKinds.ZERO
        for mask in _part_propagator([])(graph, [TermKinds.CONSTANT] * len(graph.inputs))
    ]


def _part_propagator(added: list[Node]) -> Run:
    """Returns a function that propagates `TermKinds` masks through a graph. The function appends to
    `added` the nodes with a result that is both CONSTANT and LINEAR."""
    known: dict[tuple[Graph, tuple[int, ...]], Masks] = {}

    def run(graph: Graph, ins: Masks) -> Masks:
        key = graph, tuple(ins)
        if key not in known:
            record = {value: int(_part_of_array(array)) for value, array in graph.constants.items()}
            outs = zip(graph.outputs, spread(graph, ins, rule, record), strict=True)
            known[key] = [_part_of_array(v.val) if isinstance(v, Literal) else m for v, m in outs]
        return known[key]

    def rule(node: Node, ins: Masks) -> Masks:
        pairs = zip(node.inputs, ins, strict=True)
        ins = [_part_of_array(v.val) if isinstance(v, Literal) else mask for v, mask in pairs]
        # A cond's branch index and a while loop's condition are not terms of the result.
        given = [TermKinds.ZERO, *ins[1:]] if node.primitive is _jax.COND else ins
        entered = None if node.primitive in _jax.WHILES else enter(node, given, run)
        outs = _result_parts(node, ins) if entered is None else entered[0]
        if TermKinds.CONSTANT | TermKinds.LINEAR in outs:
            added.append(node)
        return outs

    return run


def _result_parts(node: Node, ins: Masks) -> Masks:
    """For an operation whose regions are not entered."""
    if node.op == "select_n":
        return [joined(ins[1:])]
    if node.op in operations.ADDITIVE:
        places = operations.ADDITIVE[node.op]
        return [joined(ins if places is None else [ins[i] for i in places])]
    if (node.op in operations.PRODUCTS and TermKinds.ZERO in ins) or (
        node.op in operations.LINEAR and ins[0] == TermKinds.ZERO
    ):
        return [TermKinds.ZERO] * len(node.outputs)
    parts = data_flow(node, ins)
    return [TermKinds.LINEAR if mask & TermKinds.LINEAR else TermKinds.CONSTANT for mask in parts]


def _part_of_array(array: Any) -> TermKinds:
    if isinstance(array, jax.core.Tracer) or not _is_number(array):
        return TermKinds.CONSTANT
    return TermKinds.CONSTANT if np.any(np.asarray(array)) else TermKinds.ZERO


def _is_number(array: Any) -> bool:
    dtype = getattr(array, "dtype", None)
    return dtype is None or jax.numpy.issubdtype(dtype, np.number)
