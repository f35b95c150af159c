"""Values that a function with a derivative of its own closes over must not be differentiated.

Its rule has no derivative with respect to them. For a `jax.custom_vjp` JAX says so; in the place of
that of a `jax.custom_jvp` it takes zero, in silence, once the function is part of a program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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

    @jax.custom_jvp
    def closed_over(value: Any) -> Any:
        return value

    @closed_over.defjvp
    def _(primals: Any, tangents: Any) -> Any:  # called only where the value is differentiated
        if not matters():
            return primals[0], jnp.zeros_like(tangents[0])
        raise ValueError(
            f"the custom gradient {node.name} closes over a value that is being differentiated "
            f"({_jax.type_text(jax.typeof(primals[0]))}), and its rule has no gradient for it. "
            "Pass the value as an argument of the function or, if it is meant as a constant, use "
            f"stop_gradient of it: {Occurrence((), node)}"
        )

    return closed_over(value)


def may_hold_tracers(function: Any) -> bool:
    """Whether a function closes over values of a trace, or over what cannot be looked through."""
    pending, seen = [function], set[int]()
    while pending:
        held = pending.pop()
        if isinstance(held, jax.core.Tracer) or len(seen) > _MOST:
            return True
        if id(held) in seen or isinstance(held, _WITHOUT):
            continue
        seen.add(id(held))
        if isinstance(held, functools.partial):
            pending += [held.func, *held.args, *held.keywords.values()]
        elif isinstance(held, FunctionType):
            pending += [_content(cell) for cell in held.__closure__ or ()]
            pending += [*(held.__defaults__ or ()), *(held.__kwdefaults__ or {}).values()]
        elif isinstance(held, MethodType):
            pending += [held.__func__, held.__self__]
        elif isinstance(held, tuple | list | set | frozenset):
            pending += held
        elif isinstance(held, dict):
            pending += held.values()
        elif hasattr(held, "__dict__"):
            pending += [*vars(held).values(), getattr(held, "__wrapped__", None)]
        else:
            return True
    return False


_MOST = 10_000
_WITHOUT = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type, ModuleType),
    *(BuiltinFunctionType, np.ndarray, np.generic, np.dtype, jax.Array),
)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


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
    met: list[None] = []

    @jax.custom_jvp
    def output(y: Any) -> Any:
        return y

    @functools.partial(output.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:  # called for tangents that are not symbolic zeros
        met.append(None)
        return primals[0], tangents[0]

    def derivative(*values: Any) -> Any:
        def along(operands: list[Any]) -> Any:
            return [
                output(leaf) for leaf in primal(*operands) if _jax.has_gradient(jax.typeof(leaf))
            ]

        return _jax.vjp_of_some(along, values, [position])[0]

    jax.make_jaxpr(derivative)(*avals)
    return bool(met)
