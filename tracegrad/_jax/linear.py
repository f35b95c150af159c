"""Linear functions, element by element, with a transpose that is not JAX's.

`jax.custom_derivatives.linear_call` is that for any linear function, and cannot be mapped
(`jax.vmap`). The tables of rules are those of `jax.interpreters`, as in `primitives`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir  # noqa: TID251 (see `identity_primitive`)

from tracegrad._jax.primitives import mapped_alike

_LINEAR: Any = jex.Primitive("linear_by_element")


def linear_by_element(
    run: Callable[[Any, Any], Any],
    transpose: Callable[[Any, Any], Any],
    operand: Any,
    factor: Any,
) -> Any:
    """``run(operand, factor)``, which is linear in the operand.

    Args:
      run: an operation element by element, whose result has the shape of the operand.
      transpose: ``transpose(cotangent, factor)``, likewise, gives the cotangent of the operand.
        Under `jax.vmap` both are given larger arrays.
      operand, factor: the arrays; the factor is a number, or has as many axes.

    It is not differentiated itself: put it into a function with a `jax.custom_jvp`.
    """
    return _LINEAR.bind(operand, factor, run=run, transpose=transpose)


def _run(operand: Any, factor: Any, *, run: Callable[[Any, Any], Any], **_: Any) -> Any:
    return run(operand, factor)


def _type(*avals: Any, run: Callable[[Any, Any], Any], **_: Any) -> Any:
    (aval,) = jax.make_jaxpr(lambda *arrays: run(*arrays))(*avals).out_avals
    return aval


def _transpose(
    cotangent: Any, operand: Any, factor: Any, *, transpose: Callable[[Any, Any], Any], **_: Any
) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(operand.aval), None]
    return [transpose(cotangent, factor), None]


def _batch(args: Any, axes: Any, **params: Any) -> Any:
    operand, factor = mapped_alike(args, axes)
    if factor.ndim < operand.ndim:  # a number for each element of the batch
        factor = factor.reshape(len(factor), *[1] * (operand.ndim - 1))
        factor = jnp.broadcast_to(factor, operand.shape)
    return _LINEAR.bind(operand, factor, **params), 0


_LINEAR.def_impl(_run)
_LINEAR.def_abstract_eval(_type)
mlir.register_lowering(_LINEAR, mlir.lower_fun(_run, multiple_results=False))
ad.primitive_transposes[_LINEAR] = _transpose
batching.primitive_batchers[_LINEAR] = _batch
