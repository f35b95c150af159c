"""What the backward pass of a node reads, asked of JAX.

JAX traces the node's own VJP; its residuals are traced back, through operations that the backward
pass can do again for next to nothing, to the node's operands and results. What comes of a costly
operation inside the rule (the stacks of a scan, the factors of a decomposition) is memory of its
own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Node, Occurrence, RegionNode
from tracegrad.lowering import Lowering
from tracegrad.lowering.evaluate import evaluate_node
from tracegrad.rewriting.planning.flops import elements


@dataclass(frozen=True, slots=True)
class Residuals:
    """Of a node: the positions of the operands and results that its backward pass reads, and the
    bytes of what it reads beside those."""

    operands: tuple[int, ...]
    results: tuple[int, ...]
    extra: int


# Done again in the backward pass, fused into what reads them.
_COSTLY = frozenset(
    [
        "dot_general",
        "conv_general_dilated",
        "scan",
        "while",
        "cond",
        "sort",
        "top_k",
        "fft",
        "cholesky",
        "lu",
        "qr",
        "eigh",
        "eig",
        "svd",
        "triangular_solve",
        "custom_linear_solve",
        "pallas_call",
        "gather",
        "scatter",
        "scatter-add",
        "random_bits",
    ]
)


def nbytes(aval: Any) -> int:
    """Bytes of a value of a type; 0 for what is not an array of numbers."""
    dtype = getattr(aval, "dtype", None)
    return elements(aval) * int(getattr(dtype, "itemsize", 0) or 0)


class NodeResiduals:
    """Answers for nodes; asks JAX once for those that differ in their operands' values alone."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Residuals] = {}
        self._keep_alive: list[Any] = []  # what is known by its identity

    def of(self, node: Node, active: Sequence[int]) -> Residuals:
        """`active`: the positions of the operands that get a cotangent.

        Raises ValueError, naming the node and its line, if it has no reverse-mode derivative.
        """
        key = (self._key(node), tuple(active))
        if key not in self._known:
            try:
                self._known[key] = _ask(node, active)
            except Exception as error:
                raise ValueError(
                    "cannot plan what to recompute for a program without a gradient: "
                    f"{Occurrence((), node)} has no reverse-mode derivative ({error})"
                ) from error
        return self._known[key]

    def _key(self, node: Node) -> Hashable:
        types = tuple(str(v.aval) for v in node.inputs)
        params = []
        for name, value in node.params.items():
            try:
                hash(value)
            except TypeError:
                value = id(value)
                self._keep_alive.append(node.params)
            params.append((name, value))
        regions = tuple(node._regions.items()) if isinstance(node, RegionNode) else ()
        return (node.primitive, types, tuple(params), regions)


def _ask(node: Node, active: Sequence[int]) -> Residuals:
    def forward(*args: Any) -> Any:
        def bound(*chosen: Any) -> list[Any]:
            operands = list(args)
            for i, value in zip(active, chosen, strict=True):
                operands[i] = value
            return evaluate_node(node, operands, Lowering())

        results, vjp = jax.vjp(bound, *(args[i] for i in active))
        if node.regions:  # a loop shows only now that it cannot be run backwards
            jax.eval_shape(
                lambda: vjp(
                    _jax.align(
                        [v.aval for v in node.outputs],
                        [
                            jnp.zeros(v.aval.shape, v.aval.dtype)
                            for v in node.outputs
                            if _jax.has_gradient(v.aval)
                        ],
                    )
                )
            )
        return results, jax.tree.leaves(vjp)

    program = _jax.opened(jax.make_jaxpr(forward)(*(v.aval for v in node.inputs)))
    count = len(node.outputs)
    operand = {var: i for i, var in enumerate(program.invars)}
    result: dict[Any, int] = {}
    for i, var in enumerate(program.outvars[:count]):
        if not hasattr(var, "val"):
            result.setdefault(var, i)
    producer = {var: equation for equation in program.eqns for var in equation.outvars}
    operands: set[int] = set()
    results: set[int] = set()
    extra: dict[Any, int] = {}
    seen = set()
    pending = [v for v in program.outvars[count:] if not hasattr(v, "val")]
    while pending:
        var = pending.pop()
        if var in seen:
            continue
        seen.add(var)
        if var in operand:
            operands.add(operand[var])
        elif var in result:
            results.add(result[var])
        elif var in producer:
            equation = producer[var]
            if equation.primitive.name in _COSTLY or _has_costly(equation):
                extra[var] = nbytes(var.aval)
            else:
                pending += [v for v in equation.invars if not hasattr(v, "val")]
    return Residuals(tuple(sorted(operands)), tuple(sorted(results)), sum(extra.values()))


def _has_costly(equation: Any) -> bool:
    """Whether a call inside a rule does something costly."""
    for value in equation.params.values():
        if _jax.is_program(value):
            inner = _jax.opened(value).eqns
            if any(e.primitive.name in _COSTLY or _has_costly(e) for e in inner):
                return True
    return False
