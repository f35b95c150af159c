"""Values that a function with a derivative of its own closes over must not be differentiated.

Its rule has no derivative with respect to them. For a `jax.custom_vjp` JAX says so; in the place of
that of a `jax.custom_jvp` it takes zero, in silence, once the function is part of a program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir.dependence import dependence
from tracegrad.ir.graph import Graph
from tracegrad.ir.nodes import CustomGradient
from tracegrad.ir.occurrence import Occurrence


def refuse_derivatives(node: CustomGradient, args: Sequence[Any]) -> list[Any]:
    """The operands of a custom gradient; those closed over raise when they are differentiated."""
    args = list(args)
    for i in range(node.closed_over) if node.closes_over else ():
        args[i] = not_differentiated(node, args[i], functools.partial(depends_on, node.primal, i))
    return args


def loses_derivative(node: CustomGradient, reached: Sequence[bool]) -> bool:
    """Whether one of the operands that are differentiated is closed over."""
    closed_over = range(node.closed_over) if node.closes_over else ()
    return any(reached[i] and depends_on(node.primal, i) for i in closed_over)


def not_differentiated(
    node: CustomGradient, value: Any, matters: Callable[[], bool] = lambda: True
) -> Any:
    """The same value. Differentiating it raises ValueError, if then asked it matters."""
    if not isinstance(jax.typeof(value), jax.core.ShapedArray) or not _jax.has_gradient(value):
        return value

    def tangent(primals: Any, tangents: Any) -> Any:
        if not matters():
            return jnp.zeros_like(tangents[0])
        raise ValueError(
            f"the custom gradient {node.name} closes over a value that is being differentiated "
            f"({_jax.type_text(jax.typeof(primals[0]))}), and its rule has no gradient for it. "
            "Pass the value as an argument of the function or, if it is meant as a constant, use "
            f"stop_gradient of it: {Occurrence((), node)}"
        )

    return _jax.with_tangent(lambda value: value, tangent, "closed_over")(value)


def depends_on(primal: Graph, position: int) -> bool:
    """Whether a derivative of a function with respect to one input is not zero by structure.

    What goes through ``stop_gradient`` does not count: zero is right there. Nor does what is only
    closed over by the rules of functions that it calls: no result depends on it.

    Args:
      primal: the graph of the function.
      position: which of its inputs.
    """
    avals = primal.in_avals
    flows = any(mask >> position & 1 for mask in dependence(primal))
    if not flows or not _jax.has_gradient(avals[position]):
        return False
    met: list[bool] = []

    def derivative(*values: Any) -> Any:
        def along(operands: list[Any]) -> Any:
            return [
                _jax.with_witness_of_tangent(leaf, lambda: met.append(True))
                for leaf in primal(*operands)
                if _jax.has_gradient(jax.typeof(leaf))
            ]

        return _jax.vjp_of_some(along, values, [position])[0]

    jax.make_jaxpr(derivative)(*avals)
    return bool(met)
