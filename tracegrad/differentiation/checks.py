"""Checks the arguments of the derivative functions, and the results of the user's function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from tracegrad.differentiation.wrt import check_wrt
from tracegrad.ir.wording import with_article
from tracegrad.tracing.graphs import function_name
from tracegrad.variables.trees import without_variables

Unconnected = Literal["zero", "none", "raise"]  # the gradient of a leaf that no output depends on


def check(fun: Callable[..., Any], wrt: Any, unconnected: Unconnected = "zero") -> None:
    if not callable(fun):
        raise TypeError(f"expected a function to differentiate, got {fun!r}")
    check_wrt(wrt)
    if unconnected not in (known := get_args(Unconnected)):
        raise ValueError(f"unconnected must be one of {', '.join(known)}; got {unconnected!r}")


def take_name_of(
    fun: Callable[..., Any], what: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(derivative: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = functools.wraps(fun, updated=())(derivative)
        wrapped.__doc__ = f"{what} of {function_name(fun)}; takes the same arguments."
        return wrapped

    return decorate


def scalar_result(fun: Callable[..., Any], result: Any, has_aux: bool = False) -> tuple[Any, Any]:
    """Raises TypeError if the result is not a scalar; returns the scalar and `aux`."""
    value, aux = pair(fun, result) if has_aux else (result, None)
    value = without_variables(value)
    leaves = jax.tree.leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        raise TypeError(
            f"only a scalar has a gradient; {function_name(fun)} returns a "
            f"{type(value).__name__}. Return one scalar"
            + ("" if has_aux else ", and other results with has_aux=True")
            + ", or take `jacobian`"
        )
    if jnp.shape(value) != ():
        raise TypeError(
            f"only a scalar has a gradient; {function_name(fun)} returns an array of shape "
            f"{jnp.shape(value)}. Return its sum or mean, or take `jacobian`"
        )
    return value, aux


def pair(fun: Callable[..., Any], result: Any) -> tuple[Any, Any]:
    """Raises TypeError if the result is not a pair."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"has_aux=True: {function_name(fun)} must return a pair (value, aux); it returns "
            + with_article(type(result).__name__)
            + (f" of length {len(result)}" if isinstance(result, tuple) else "")
        )
    return result


def flat_outputs(
    fun: Callable[..., Any], result: Any, has_aux: bool, shape_of_result: list[Any]
) -> tuple[list[Any], Any]:
    """Writes the structure of the outputs and the shapes of their leaves to `shape_of_result`."""
    outputs, aux = pair(fun, result) if has_aux else (result, None)
    leaves, structure = jax.tree.flatten(outputs)
    if not leaves:
        raise TypeError(
            f"only arrays have derivatives; {function_name(fun)} returns "
            + with_article(type(outputs).__name__)
            + " without an array. Is its `return` missing?"
        )
    shape_of_result[:] = structure, list(map(jnp.shape, leaves))
    return leaves, aux
