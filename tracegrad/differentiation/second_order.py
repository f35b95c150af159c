"""Second derivatives: forward mode over reverse mode, also through custom gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.checks import (
    check,
    differentiable_leaves,
    flattened,
    named_after,
    scalar_result,
    spread_out,
    wrt_or_argnums,
)
from tracegrad.differentiation.closing_over import refusing
from tracegrad.differentiation.forward import jvp
from tracegrad.differentiation.gradient_types import zero_block
from tracegrad.differentiation.module_state import ModuleState
from tracegrad.differentiation.selection import Selection, Wrt, resolve
from tracegrad.rewriting.forward_mode import with_forward_mode
from tracegrad.tracing import to_callable
from tracegrad.tracing.graphs import function_name, graph
from tracegrad.tracing.in_force import under_rules


def hessian(
    fun: Callable[..., Any],
    wrt: Wrt | None = None,
    has_aux: bool = False,
    *,
    argnums: int | Sequence[int] | None = None,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """The matrix of second derivatives of a function: forward mode over reverse mode.

    Args:
      fun: a traced or plain function of what `jax.jit` takes, that returns a float scalar (or a
        pytree of float arrays: then one Hessian for each element of each).
      wrt, argnums: as in `grad`.
      has_aux: whether `fun` returns ``(outputs, aux)``.
      holomorphic: as in `grad`.

    Returns:
      A function of the same arguments. It returns, as `jax.hessian`, a tree like the selected
      argument(s) in which each leaf is again such a tree; for leaves ``f32[m]`` and ``f32[n]`` of a
      scalar function it holds ``f32[m, n]``. Entries of leaves that are not selected are as
      in `grad`. With `has_aux` ``(hessian, aux)``. Complex numbers follow JAX's convention.

    Raises:
      TypeError, ValueError: as `grad`.

    >>> import jax.numpy as jnp
    >>> from tracegrad.differentiation import hessian
    >>> print(hessian(lambda x: x[0] ** 2 * x[1])(jnp.array([3.0, 5.0])))
    [[10.  6.]
     [ 6.  0.]]
    """
    wrt = wrt_or_argnums(wrt, argnums)
    check(fun, wrt)

    @named_after(fun, "Hessian")
    def hessian_of(*args: Any, **kwargs: Any) -> Any:
        selection = resolve(fun, wrt, args, kwargs)
        differentiable = differentiable_leaves(selection)
        chosen = selection.refined(differentiable)
        shape_of_result: list[Any] = []
        state = ModuleState(chosen)

        def result(leaves: list[Any]) -> tuple[list[Any], Any]:
            outputs, assigned = state.call(leaves)
            outputs, aux = flattened(fun, outputs, has_aux, shape_of_result)
            return outputs, (aux, assigned)

        flat = refusing(under_rules(result, function_name(fun)))
        first = _jax.jacrev(flat, has_aux=True, holomorphic=holomorphic)
        leaves = chosen.leaves
        program = to_callable(with_forward_mode(graph(first)(leaves)))
        forward = _jax.jacfwd(program, has_aux=True, holomorphic=holomorphic)
        blocks, (aux, assigned) = forward(leaves)
        state.assign(assigned)
        structure, shapes = shape_of_result
        answer = jax.tree.unflatten(
            structure,
            [
                _rows_and_columns(selection, differentiable, of_output, shape)
                for of_output, shape in zip(blocks, shapes, strict=True)
            ],
        )
        return (answer, aux) if has_aux else answer

    return hessian_of


def _rows_and_columns(
    selection: Selection,
    differentiable: Sequence[bool],
    blocks: Sequence[Sequence[Any]],
    shape: tuple[int, ...],
) -> Any:
    """The Hessian of one output leaf, from one block per pair of differentiable leaves."""
    rows: list[Any] = []
    given = iter(blocks)
    for leaf, is_differentiable in zip(selection.leaves, differentiable, strict=True):
        if not is_differentiable:
            rows.append(None)
            continue
        beside = functools.partial(zero_block, (*shape, *jnp.shape(leaf)))
        rows.append(selection.answer(spread_out(next(given), differentiable), beside))

    def row_of_zeros(leaf: Any) -> Any:
        above = zero_block(shape, leaf)
        if above is None:
            return None
        row = functools.partial(zero_block, (*shape, *jnp.shape(leaf)))
        zeros = map(row, itertools.compress(selection.leaves, differentiable))
        return selection.answer(spread_out(list(zeros), differentiable), row)

    return selection.answer(rows, row_of_zeros)


def hvp(
    fun: Callable[..., Any],
    primals: Sequence[Any],
    v: Any,
    wrt: Wrt = 0,
) -> Any:
    """A Hessian times a vector, at about twice the cost of a gradient: forward over reverse.

    Args:
      fun: a traced or plain function of what `jax.jit` takes, that returns a float scalar.
      primals: a tuple of its arguments.
      v: the vector, of the structure that `grad` would return for `wrt`, and its shapes; entries
        for leaves that are not selected are not looked at.
      wrt: as in `grad`: the block of the Hessian that belongs to what is selected.

    Returns:
      The product, of the structure of `v`. It can itself be differentiated, batched and compiled.
      Complex numbers follow JAX's convention.

    Raises:
      TypeError, ValueError: as `grad`; ValueError if `v` does not fit what is selected.

    >>> import jax.numpy as jnp
    >>> from tracegrad.differentiation import hvp
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
    selection = resolve(fun, wrt, tuple(primals), {})
    differentiable = differentiable_leaves(selection)
    given = list(itertools.compress(selection.flatten(v), differentiable))
    selected = selection
    selection = selected.refined(differentiable)
    leaves = selection.leaves
    vector = [
        _direction(leaf, entry, path)
        for leaf, entry, path in zip(leaves, given, selection.names, strict=True)
    ]

    state = ModuleState(selection)

    def result(leaves: list[Any]) -> Any:
        outcome, assigned = state.call(leaves)
        return scalar_result(fun, outcome), assigned

    def gradient(leaves: list[Any]) -> Any:
        return _jax.grad(refusing(under_rules(result, function_name(fun))), has_aux=True)(leaves)

    _, product, assigned = jvp(gradient, (leaves,), (vector,), has_aux=True)
    state.assign(assigned)
    return selected.answer(spread_out(product, differentiable))


def _direction(leaf: Any, entry: Any, path: str) -> Any:
    """The entry of `v` for one leaf, checked; a Python number takes the leaf's dtype."""
    given, expected = jnp.asarray(entry), jax.typeof(leaf)
    if given.shape != expected.shape:
        raise ValueError(f"v has the shape {given.shape} for {path}, which is {expected.shape}")
    return given.astype(expected.dtype) if jax.typeof(given).weak_type else given
