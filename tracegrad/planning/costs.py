"""Computes the cost of a node: the floating point operations (FLOPs), by a formula for the
primitive, and the bytes of the results.

A multiply-add counts as two operations. A primitive without a formula takes one operation for each
element of its largest operand or result, which is right for element-wise operations and reductions.
An operation on complex numbers counts as operations on their parts: 6 for a product, 8 for a
multiply-add, 2 for a sum. Random bits count the integer operations of their generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import operations
from tracegrad.ir.graph import Graph
from tracegrad.ir.nodes import CustomGradient, Node


def node_flops(node: Node, known: dict[Graph, int]) -> int:
    """Returns the FLOPs of one run of a node; `known` caches the FLOPs of regions.

    A scan costs its length times its body. A while loop counts as one iteration, since the number
    of iterations is not known. A `cond` costs its most expensive branch. A symbolic size counts as
    1.
    """
    if node.regions:
        costs = [_graph_flops(region, known) for region in node.regions.values()]
        if node.primitive is _jax.COND:
            return max(costs)
        return int(_runs_of_region(node) * sum(costs))
    formula = _FORMULAS.get(node.op, _elementwise)
    parts = 1 if node.op in _COUNTS_PARTS else _operations_on_parts(node)
    return int(parts * formula(node))


def size_of(dimension: Any) -> int:
    """A symbolic dimension counts as 1."""
    return dimension if isinstance(dimension, int) else 1


def elements(aval: Any) -> int:
    return math.prod(map(size_of, getattr(aval, "shape", ())))


def nbytes(aval: Any) -> int:
    """On each device; 0 for a type that is not an array."""
    dtype = getattr(aval, "dtype", None)
    return math.prod(map(size_of, _jax.local_shape(aval))) * int(getattr(dtype, "itemsize", 0) or 0)


def is_by_element(node: Node) -> bool:
    """Whether a node is element-wise, or a view."""
    if isinstance(node, CustomGradient) or node.primitive is _jax.JIT:
        nodes = [inner for region in node.regions.values() for inner in region.nodes]
        return all(map(is_by_element, nodes))
    return node.op in operations.VIEWS | operations.CHEAP | operations.COSTLY


def _graph_flops(graph: Graph, known: dict[Graph, int]) -> int:
    if graph not in known:
        known[graph] = sum(node_flops(node, known) for node in graph.nodes)
    return known[graph]


def _runs_of_region(node: Node) -> float:
    if node.primitive is _jax.SCAN:
        return size_of(node.params["length"])
    if node.op == "reduce":  # its operands are arrays, followed by an initial value for each
        return elements(node.inputs[0].aval)
    return _windows(node) if node.op == "reduce_window" else 1


def _operations_on_parts(node: Node) -> int:
    """The number of real operations in one operation of the node."""
    dtypes = [getattr(atom.aval, "dtype", None) for atom in (*node.inputs, *node.outputs)]
    if not any(d is not None and jnp.issubdtype(d, jnp.complexfloating) for d in dtypes):
        return 1
    return _ON_PARTS.get(node.op, 4 if node.op in _FORMULAS else 2)


def _operand_shape(node: Node, position: int = 0) -> list[int]:
    return [size_of(d) for d in node.inputs[position].aval.shape]


def _no_flops(node: Node) -> float:
    return 0


def _elementwise(node: Node) -> float:
    return max((elements(v.aval) for v in (*node.inputs, *node.outputs)), default=0)


def _dot_general(node: Node) -> float:
    (contracted, _), _ = node.params["dimension_numbers"]
    lhs = _operand_shape(node)
    return 2.0 * elements(node.outputs[0].aval) * int(math.prod(lhs[i] for i in contracted))


def _convolution(node: Node) -> float:
    kernel = _operand_shape(node, 1)
    _, features_in, *window = node.params["dimension_numbers"].rhs_spec
    # The kernel has the input features of one group only.
    taps = int(math.prod(kernel[i] for i in (features_in, *window)))
    return 2.0 * elements(node.outputs[0].aval) * taps


def _ragged_dot(node: Node) -> float:
    ((contracted, _), _) = node.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    lhs, groups = _operand_shape(node), 1
    if set(node.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions) & set(contracted):
        groups = _operand_shape(node, 2)[-1]  # each group sums its part, and has its own result
    length = int(math.prod(lhs[i] for i in contracted))
    return 2.0 * elements(node.outputs[0].aval) * length / max(1, groups)


def _fft(node: Node) -> float:
    lengths = [size_of(n) for n in node.params["fft_lengths"]]
    count = max(elements(node.inputs[0].aval), elements(node.outputs[0].aval))
    is_of_real = node.inputs[0].aval.dtype.kind == "f" or node.outputs[0].aval.dtype.kind == "f"
    return (2.5 if is_of_real else 5) * count * math.log2(max(2, math.prod(lengths)))


def _windows(node: Node) -> float:
    """The number of elements of all windows together."""
    window = math.prod(map(size_of, node.params["window_dimensions"]))
    return float(elements(node.outputs[0].aval) * window)


def _random_bits(node: Node) -> float:
    words: float = elements(node.outputs[0].aval) * node.params["bit_width"] / 32
    return words * _RANDOM_WORD


def _threefry(node: Node) -> float:
    return len(node.outputs) * elements(node.outputs[0].aval) * _RANDOM_WORD


def _random_key(node: Node) -> float:
    return 2 * elements(node.outputs[0].aval) * _RANDOM_WORD


def _sort(node: Node) -> float:
    axis = node.params.get("dimension", -1)
    return elements(node.inputs[0].aval) * math.log2(max(2, _operand_shape(node)[axis]))


def _square_matrices(factor: float) -> Callable[[Node], float]:
    """``factor * n ** 3`` per ``n × n`` matrix."""
    return lambda node: factor * elements(node.inputs[0].aval) * _operand_shape(node)[-1]


def _rectangular_matrices(factor: float) -> Callable[[Node], float]:
    """``factor * m * n * min(m, n)`` per ``m × n`` matrix."""
    return lambda node: factor * elements(node.inputs[0].aval) * min(_operand_shape(node)[-2:])


def _triangular_solve(node: Node) -> float:
    return elements(node.inputs[1].aval) * _operand_shape(node)[-1]


# Threefry-2x32 makes two words of 32 bits in 20 rounds of a sum, a rotation (two shifts and an or)
# and an exclusive or, and adds keys and a counter after every fourth (Salmon et al. 2011).
_RANDOM_WORD = (20 * 5 + 5 * 3 + 2) / 2

# The constants come from the standard dense algorithms (Golub and Van Loan, Matrix Computations).
_FORMULAS: dict[str, Callable[[Node], float]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
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
    "reduce_window_sum": _windows,
    "reduce_window_max": _windows,
    "reduce_window_min": _windows,
    "random_bits": _random_bits,
    "threefry2x32": _threefry,
    "random_split": _random_key,
    "random_fold_in": _random_key,
} | dict.fromkeys(
    (operations.VIEWS - {"convert_element_type"}) | {"iota", "device_put"},
    _no_flops,
)

# Operations whose formula already counts the parts of complex numbers, or that compute nothing.
_COUNTS_PARTS = {"fft", "real", "imag"}
# The real operations of one complex operation; 2 (or 4 with a formula) if it is not listed.
_ON_PARTS = dict.fromkeys(("mul", "integer_pow", "square"), 6) | {"div": 11}
