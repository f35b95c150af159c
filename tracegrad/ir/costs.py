"""What a node costs: the floating point operations that it takes, by the formula of its primitive,
and the bytes of what it returns.

A multiply-add counts as two operations. What is not listed takes one for each element of its
largest operand or result, which is right for element-wise operations and for reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tracegrad import _jax
from tracegrad.ir import operations
from tracegrad.ir.graph import Graph
from tracegrad.ir.nodes import CustomGradient, Node


def node_flops(node: Node, known: dict[Graph, int]) -> int:
    """FLOPs of one run of a node; `known` remembers those of regions.

    A scan takes its length times its body, a while loop counts as one iteration (how many there
    are is not known), a branch as the most costly one. A symbolic size counts as one.
    """
    if node.regions:
        costs = [_graph_flops(region, known) for region in node.regions.values()]
        if node.primitive is _jax.COND:
            return max(costs)
        times = size_of(node.params["length"]) if node.primitive is _jax.SCAN else 1
        return times * sum(costs)
    formula = _FORMULAS.get(node.op, _elementwise)
    return int(formula(node))


def size_of(dimension: Any) -> int:
    """An array dimension as a number; one that is symbolic counts as 1."""
    return dimension if isinstance(dimension, int) else 1


def elements(aval: Any) -> int:
    """How many elements a value of a type has."""
    return math.prod(map(size_of, getattr(aval, "shape", ())))


def nbytes(aval: Any) -> int:
    """Bytes of a value of a type, on each device; 0 for what is not an array of numbers, or waits
    in the host's memory."""
    return 0 if _jax.is_on_host(aval) else nbytes_anywhere(aval)


def nbytes_anywhere(aval: Any) -> int:
    """`nbytes`, in whose memory it may be."""
    dtype = getattr(aval, "dtype", None)
    return math.prod(map(size_of, _jax.local_shape(aval))) * int(getattr(dtype, "itemsize", 0) or 0)


def is_by_element(node: Node) -> bool:
    """Whether it is a view, or computes each element of its results of one of each operand."""
    if isinstance(node, CustomGradient) or node.primitive is _jax.JIT:
        nodes = [inner for region in node.regions.values() for inner in region.nodes]
        return all(map(is_by_element, nodes))
    return node.op in operations.VIEWS | operations.CHEAP | operations.COSTLY


def _graph_flops(graph: Graph, known: dict[Graph, int]) -> int:
    if graph not in known:
        known[graph] = sum(node_flops(node, known) for node in graph.nodes)
    return known[graph]


def _shape(node: Node, position: int = 0) -> list[int]:
    return [size_of(d) for d in node.inputs[position].aval.shape]


def _nothing(node: Node) -> float:
    return 0


def _elementwise(node: Node) -> float:
    return max((elements(v.aval) for v in (*node.inputs, *node.outputs)), default=0)


def _dot_general(node: Node) -> float:
    (contracted, _), _ = node.params["dimension_numbers"]
    lhs = _shape(node)
    return 2.0 * elements(node.outputs[0].aval) * int(math.prod(lhs[i] for i in contracted))


def _convolution(node: Node) -> float:
    kernel = _shape(node, 1)
    _, features_in, *window = node.params["dimension_numbers"].rhs_spec
    # The kernel's input features are those of one group.
    taps = int(math.prod(kernel[i] for i in (features_in, *window)))
    return 2.0 * elements(node.outputs[0].aval) * taps


def _fft(node: Node) -> float:
    lengths = [size_of(n) for n in node.params["fft_lengths"]]
    count = max(elements(node.inputs[0].aval), elements(node.outputs[0].aval))
    return 5 * count * math.log2(max(2, math.prod(lengths)))


def _sort(node: Node) -> float:
    axis = node.params.get("dimension", -1)
    return elements(node.inputs[0].aval) * math.log2(max(2, _shape(node)[axis]))


def _square_matrices(factor: float) -> Callable[[Node], float]:
    """Per matrix ``factor * n ** 3``."""
    return lambda node: factor * elements(node.inputs[0].aval) * _shape(node)[-1]


def _rectangular_matrices(factor: float) -> Callable[[Node], float]:
    """Per ``m × n`` matrix ``factor * m * n * min(m, n)``."""
    return lambda node: factor * elements(node.inputs[0].aval) * min(_shape(node)[-2:])


def _triangular_solve(node: Node) -> float:
    return elements(node.inputs[1].aval) * _shape(node)[-1]


# Golub and Van Loan, Matrix Computations; constants of the standard dense algorithms.
_FORMULAS: dict[str, Callable[[Node], float]] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "fft": _fft,
    "sort": _sort,
    "top_k": _sort,
    "cholesky": _square_matrices(1 / 3),
    "lu": _rectangular_matrices(2 / 3),
    "triangular_solve": _triangular_solve,
    "geqrf": _rectangular_matrices(4 / 3),
    "householder_product": _rectangular_matrices(4 / 3),
    "qr": _rectangular_matrices(8 / 3),
    "eigh": _square_matrices(9),
    "eig": _square_matrices(25),
    "svd": _rectangular_matrices(22),
    "schur": _square_matrices(25),
    "hessenberg": _square_matrices(10 / 3),
    "tridiagonal_solve": _elementwise,
} | dict.fromkeys(
    (operations.VIEWS - {"convert_element_type"}) | {"iota", "device_put"},
    _nothing,
)
