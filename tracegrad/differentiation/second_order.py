"""Second derivatives: forward mode over reverse mode, also through custom gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.checks import (
    check,
    flat_outputs,
    scalar_result,
    take_name_of,
)
from tracegrad.differentiation.forward import jvp
from tracegrad.differentiation.gradient_types import as_inexact, zero_block
from tracegrad.differentiation.partition import Partition
from tracegrad.differentiation.wrt import Wrt, partition
from tracegrad.ir.wording import brief
from tracegrad.rewriting.forward_mode import with_forward_mode
from tracegrad.tracing import to_callable
from tracegrad.tracing.graphs import function_name, graph
from tracegrad.tracing.in_force import under_rules, without_editing


def hessian(
    fun: Callable[..., Any],
    wrt: Wrt = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes the matrix of second derivatives of `fun`.

    It uses forward mode over reverse mode.

    Args:
      fun: a traced or plain function, of any arguments that `jax.jit` takes, that returns a float
        scalar (or a pytree of float arrays: then each element of each array has a Hessian).
      wrt: as in `grad`.
      has_aux: whether `fun` returns ``(outputs, aux)``.
      holomorphic: as in `grad`.

    Returns:
      A function of the same arguments. As `jax.hessian` does, it returns a tree like the
      selected argument(s) in which each leaf is again such a tree. For leaves ``f32[m]`` and
      ``f32[n]`` of a scalar function, the block of the two is ``f32[m, n]``. Leaves that are not
      selected get the entries that they get in `grad`. With `has_aux` it returns
      ``(hessian, aux)``. Complex numbers follow JAX's convention.

    Raises:
      TypeError, ValueError: as `grad`.

    >>> import jax.numpy as jnp
    >>> from tracegrad import hessian
    >>> print(hessian(lambda x: x[0] ** 2 * x[1])(jnp.array([3.0, 5.0])))
    [[10.  6.]
     [ 6.  0.]]
    """
    check(fun, wrt)

    @take_name_of(fun, "Hessian")
    def hessian_of(*args: Any, **kwargs: Any) -> Any:
        call = partition(fun, wrt, args, kwargs).differentiable()
        shape_of_result: list[Any] = []
        flat = call.of_leaves(lambda outcome: flat_outputs(fun, outcome, has_aux, shape_of_result))

        def first(leaves: list[Any]) -> Any:
            return _jax.jacobian_rows(flat, leaves, holomorphic=holomorphic)

        leaves = call.leaves
        rows = under_rules(first, function_name(fun), forward=True, paths=lambda: call.names)
        with without_editing():
            program = to_callable(with_forward_mode(graph(rows, leaves)))
            forward = _jax.jacfwd(program, has_aux=True, holomorphic=holomorphic)
            blocks, beside = forward(leaves)
        aux = call.settle(beside)
        structure, shapes = shape_of_result
        answer = jax.tree.unflatten(
            structure,
            [
                _rows_and_columns(call, of_output, shape)
                for of_output, shape in zip(blocks, shapes, strict=True)
            ],
        )
        return (answer, aux) if has_aux else answer

    return hessian_of


def _rows_and_columns(
    call: Partition, blocks: Sequence[Sequence[Any]], shape: tuple[int, ...]
) -> Any:
    """Returns the Hessian of one output leaf, from one block per pair of differentiable leaves.

    `Partition.answer` places the blocks of the selected leaves in the tree; its second argument
    makes the entry of a leaf that is not selected.
    """
    leaves = call.leaves
    rows = [
        call.answer(row, functools.partial(zero_block, (*shape, *jnp.shape(leaf))))
        for leaf, row in zip(leaves, blocks, strict=True)
    ]

    def row_of_zeros(leaf: Any) -> Any:
        above = zero_block(shape, leaf)
        if above is None:
            return None
        row = functools.partial(zero_block, (*shape, *jnp.shape(leaf)))
        return call.answer(list(map(row, leaves)), row)

    return call.answer(rows, row_of_zeros)


def hvp(
    fun: Callable[..., Any],
    primals: Sequence[Any],
    v: Any,
    wrt: Wrt = 0,
) -> Any:
    """Returns a Hessian times a vector, at about twice the cost of a gradient.

    It uses forward mode over reverse mode.

    Args:
      fun: a traced or plain function, of any arguments that `jax.jit` takes, that returns a float
        scalar.
      primals: a tuple of the arguments of `fun`.
      v: the vector, with the structure and shapes of the gradient that `grad` returns for `wrt`;
        entries for leaves that are not selected are ignored.
      wrt: as in `grad`; selects the block of the Hessian.

    Returns:
      The product, with the structure of the gradient that `grad` returns. A call of `hvp` can be
      differentiated, batched and compiled. Complex numbers follow JAX's convention.

    Raises:
      TypeError, ValueError: as `grad`; ValueError if `v` does not fit the selected leaves.

    >>> import jax.numpy as jnp
    >>> from tracegrad import hvp
    >>> def energy(x, k):
    ...     return k * jnp.sum(x**3)
    >>> print(hvp(energy, (jnp.array([1.0, 2.0]), 2.0), jnp.array([1.0, 10.0])))
    [ 12. 240.]
    """
    check(fun, wrt)
    if not isinstance(primals, (tuple, list)):
        raise TypeError(
            f"primals is a tuple, with one entry per argument; got {type(primals).__name__}"
        )
    call = partition(fun, wrt, tuple(primals), {}).differentiable()
    leaves = call.leaves
    vector = [
        _check_direction(leaf, entry, path)
        for leaf, entry, path in zip(leaves, call.entries(v), call.names, strict=True)
    ]

    def gradient(leaves: list[Any]) -> Any:
        scalar = call.of_leaves(lambda outcome: scalar_result(fun, outcome))
        with without_editing():
            return _jax.grad(scalar, has_aux=True)(leaves)

    edited = under_rules(gradient, function_name(fun), forward=True, paths=lambda: call.names)
    with without_editing():
        _, product, beside = jvp(edited, (leaves,), (vector,), has_aux=True)
    call.settle(beside)
    return call.answer(product)


def _check_direction(leaf: Any, entry: Any, path: str) -> Any:
    """A Python number gets the dtype of the leaf."""
    expected = jax.typeof(leaf)
    try:
        given = jnp.asarray(as_inexact(entry, expected.dtype))
    except (TypeError, ValueError):
        raise ValueError(
            f"v has {brief(entry)} for {path}, whose shape is {expected.shape}. v must have the "
            "structure that `grad` returns for wrt, which is the first argument by default"
        ) from None
    if given.shape != expected.shape:
        raise ValueError(
            f"v has the shape {given.shape} for {path}, whose shape is {expected.shape}"
        )
    return given.astype(expected.dtype) if jax.typeof(given).weak_type else given
