"""Refuses to differentiate with respect to values that a custom gradient closes over.

The rule of the custom gradient has no derivative with respect to these values. For a
`jax.custom_vjp` JAX raises an error; for a `jax.custom_jvp` that is part of a program, JAX silently
takes the derivative to be zero.
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
    """Returns the operands of a custom gradient; differentiating closed-over operands raises."""
    args = list(args)
    for i in range(node.closed_over) if node.closes_over else ():
        args[i] = not_differentiated(node, args[i], functools.partial(depends_on, node.primal, i))
    return args


def loses_derivative(node: CustomGradient, reached: Sequence[bool]) -> bool:
    """Whether the result depends on a closed-over operand that is `reached` by a derivative."""
    closed_over = range(node.closed_over) if node.closes_over else ()
    return any(reached[i] and depends_on(node.primal, i) for i in closed_over)


def not_differentiated(
    node: CustomGradient, value: Any, matters: Callable[[], bool] = lambda: True
) -> Any:
    """Returns the value; differentiating the value raises ValueError. But if `matters`, which is
    called then, returns False, the derivative is zero instead."""
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
    """Whether the derivative of a function with respect to one input may differ from zero. It is
    zero if all paths from the input go through ``stop_gradient``, or if only the rules of custom
    gradients close over the input, since no result depends on it then."""
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
