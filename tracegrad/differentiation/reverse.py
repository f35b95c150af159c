"""Gradients and Jacobians of traced or plain functions, with respect to the selected leaves.

`jax.value_and_grad` and `jax.jacrev` do the work, on the selected leaves alone. If the answer must
tell "no gradient" from "a gradient of zero", the function is also traced to a `Graph`, because the
graph says which leaves are connected to the result (see `connectivity`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.differentiation.checks import (
    Unconnected,
    check,
    flat_outputs,
    scalar_result,
    take_name_of,
)
from tracegrad.differentiation.connectivity import UnconnectedError, connections
from tracegrad.differentiation.gradient_types import Kind, none_for, zero_block, zeros_for
from tracegrad.differentiation.lookups import call_with_slices
from tracegrad.differentiation.partition import Partition
from tracegrad.differentiation.smallest_cuts import explain_unconnected, smallest_cuts
from tracegrad.differentiation.wrt import Wrt, partition
from tracegrad.ir import Graph
from tracegrad.tracing.graphs import function_name, graph
from tracegrad.tracing.in_force import without_editing
from tracegrad.tracing.user_errors import explaining


def grad(
    fun: Callable[..., Any],
    wrt: Wrt = 0,
    has_aux: bool = False,
    unconnected: Unconnected = "zero",
    sparse: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes the gradient of `fun` with respect to the leaves in `wrt`.

    Args:
      fun: a traced or plain function that returns one float scalar (shape ``[]``).
      wrt: the leaves to differentiate with respect to; by default the first argument. One of:

        - a position, or an argument's name, however the argument is passed: selects all leaves of
          the argument. Leaves that are not float or complex arrays (functions, counters) get None;
        - a sequence of positions and names: the answer is a tuple;
        - a selection of leaves of the first argument: a glob for their paths
          (``"layers.*.kernel"``; see `match.param`, which takes several globs), a filter of
          flax.nnx (``nnx.Param``), or a predicate ``(path, leaf) -> bool``, with paths that begin
          below the argument's name.
          A glob that begins with the name of another argument selects leaves of that argument. The
          answer has the structure of the argument. Leaves that are not selected need not be
          differentiable. They get zeros: an array zeros of its shape and dtype, a Python number the
          zero of its type; a leaf that is not a number (a function, a random key) gets None.
          Zeros do not freeze a weight under weight decay: see `select`.
      has_aux: whether `fun` returns ``(value, aux)``; ``aux`` is returned unchanged.
      unconnected: the gradient of a selected leaf that no gradient can reach: ``"zero"``: zeros, as
        `jax.grad`; ``"none"``: None, also for leaves that are not selected; ``"raise"``: raises an
        `UnconnectedError` that names the leaf and the line that cuts the leaf off. ``"none"`` and
        ``"raise"`` trace `fun` once more, so `fun` must take arguments that `jax.jit` takes; put
        `tracegrad.trace` or `jax.jit` around a gradient that is called often. Gradients are cut by
        stop_gradient, integers and booleans, round, floor, ceil, sign, comparisons, and custom
        gradients that return None.
      sparse: whether a leaf that is only used through lookups along axis 0 (``table[ids]``,
        `jax.numpy.take`, embeddings of flax and equinox), also in jitted functions, gets
        `IndexedSlices`: one slice for each lookup. Then no array of the table's size is made, and
        `fun` is traced, so it must take arguments that `jax.jit` takes. A leaf gets an array if it
        is also used in another way, was computed, lies on a mesh with explicit axes, or is looked
        up in the body of a loop, a branch or a recomputed function.
      holomorphic: whether `fun` is complex-differentiable, as in `jax.grad`.
      allow_int: whether integer leaves and random keys may be selected; their gradients have
        dtype ``float0``.

    Returns:
      A function of the same arguments. It returns the gradient, or ``(gradient, aux)``. The
      gradient has the structure of the selected argument(s), and each leaf of the gradient has the
      shape and dtype of the argument's leaf. Complex numbers follow JAX's convention: the gradient
      of a real ``f(x + iy)`` is ``∂f/∂x - i ∂f/∂y``, the conjugate of TensorFlow's.

    Raises:
      TypeError: `wrt` is of another kind; a selected leaf is not a float or complex array (with
        ``unconnected="none"`` the leaf gets None instead); the result is not a scalar.
      ValueError: `unconnected` has another value; `wrt` selects nothing, or an argument that the
        call does not have.
      UnconnectedError: see `unconnected`.

    >>> import jax.numpy as jnp
    >>> from tracegrad import grad
    >>> def loss(params, x):
    ...     return jnp.sum(params["kernel"] * x) + params["bias"]
    >>> params = {"kernel": jnp.array([1.0, 2.0]), "bias": jnp.array(0.5)}
    >>> print(grad(loss, wrt="x")(params, jnp.ones(2)))
    [1. 2.]

    Freeze everything but the biases:

    >>> gradient = grad(loss, wrt="*.bias")(params, jnp.ones(2))
    >>> print(gradient["bias"], gradient["kernel"])
    1.0 [0. 0.]

    Tell "no gradient" from zero:

    >>> def rounded(x, y):
    ...     return jnp.round(x) + 0.0 * y
    >>> print(grad(rounded, (0, 1), unconnected="none")(1.5, 2.0))
    (None, Array(0., dtype=float32, weak_type=True))

    The gradient of a table by the rows that were looked up:

    >>> def looked_up(table, ids):
    ...     return jnp.sum(table[ids] ** 2)
    >>> gradient = grad(looked_up, sparse=True)(jnp.ones((1000, 4)), jnp.array([7, 0, 7]))
    >>> print(gradient, gradient.indices)
    IndexedSlices(values=f32[3,4], indices=i32[3], dense_shape=(1000, 4)) [7 0 7]
    """
    both = value_and_grad(
        fun,
        wrt,
        has_aux,
        unconnected,
        sparse,
        holomorphic=holomorphic,
        allow_int=allow_int,
    )

    @take_name_of(fun, "Gradient")
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, answer = both(*args, **kwargs)
        return (answer, value[1]) if has_aux else answer

    return gradient


def value_and_grad(
    fun: Callable[..., Any],
    wrt: Wrt = 0,
    has_aux: bool = False,
    unconnected: Unconnected = "zero",
    sparse: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes the value of `fun` and its gradient; see `grad`.

    Returns:
      A function of the same arguments that returns ``(value, gradient)``, or
      ``((value, aux), gradient)``. Complex numbers follow JAX's convention, as in `grad`.

    Raises:
      TypeError, ValueError, UnconnectedError: as `grad`.

    >>> import jax.numpy as jnp
    >>> from tracegrad import value_and_grad
    >>> value, (dx, dy) = value_and_grad(lambda x, y: jnp.sin(x) * y, wrt=("x", "y"))(0.0, 3.0)
    >>> print(value, dx, dy)
    0.0 3.0 0.0
    """
    check(fun, wrt, unconnected)

    @take_name_of(fun, "Value and gradient")
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        allowed: Sequence[Kind] = ("exact", "key") if allow_int else ()
        call = partition(fun, wrt, args, kwargs).differentiable(unconnected, allowed)
        scalar = call.of_leaves(lambda outcome: scalar_result(fun, outcome, has_aux))
        run = _jax.value_and_grad(
            scalar, has_aux=True, holomorphic=holomorphic, allow_int=allow_int
        )
        leaves = call.leaves
        with explaining(), without_editing():
            given, results = call_with_slices(run, leaves) if sparse else run(leaves)
        if unconnected != "zero":
            (results,) = _mark_unconnected(call, scalar, unconnected, [results])
        absent = zeros_for if unconnected != "none" else none_for
        value, beside = given
        aux = call.settle(beside)
        return ((value, aux) if has_aux else value), call.answer(results, absent)

    return value_and_gradient


def jacobian(
    fun: Callable[..., Any],
    wrt: Wrt = 0,
    has_aux: bool = False,
    unconnected: Unconnected = "zero",
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes the Jacobian of `fun` by reverse mode.

    One backward pass, batched over the outputs, computes all rows.

    Args:
      fun: a traced or plain function that returns a pytree of float arrays, or of complex arrays
        if the selected leaves are real.
      wrt, holomorphic, allow_int: as in `grad`; random keys cannot be selected.
      has_aux: whether `fun` returns ``(outputs, aux)``.
      unconnected: as in `grad`, for each pair of an output leaf and a selected leaf.

    Returns:
      A function of the same arguments. It returns a tree like `fun`'s result, in which each leaf
      is a tree like the selected argument(s). For an output ``f32[m]`` and a leaf ``f32[n]`` it
      holds ``f32[m, n]``: the shape of the output followed by the shape of the leaf. With `has_aux`
      it returns ``(jacobian, aux)``. Complex numbers follow JAX's convention, as in `jax.jacrev`;
      the Jacobian of a complex output with respect to a real leaf is complex, as in `jax.jacfwd`.

    Raises:
      TypeError, ValueError, UnconnectedError: as `grad`, but the result need not be a scalar.

    >>> import jax.numpy as jnp
    >>> from tracegrad import jacobian
    >>> def rotated(angle, point):
    ...     c, s = jnp.cos(angle), jnp.sin(angle)
    ...     return jnp.array([[c, -s], [s, c]]) @ point
    >>> by_angle, by_point = jacobian(rotated, wrt=(0, 1))(0.0, jnp.array([3.0, 4.0]))
    >>> print(by_angle)
    [-4.  3.]
    >>> print(by_point)
    [[1. 0.]
     [0. 1.]]
    """
    check(fun, wrt, unconnected)

    @take_name_of(fun, "Jacobian")
    def jacobian_of(*args: Any, **kwargs: Any) -> Any:
        # JAX has no Jacobian with respect to random keys.
        allowed: Sequence[Kind] = ("exact",) if allow_int else ()
        call = partition(fun, wrt, args, kwargs).differentiable(unconnected, allowed)
        shape_of_result: list[Any] = []  # its structure and the shapes of its leaves
        flat = call.of_leaves(lambda outcome: flat_outputs(fun, outcome, has_aux, shape_of_result))
        leaves = call.leaves
        if leaves:
            with explaining(), without_editing():
                rows, beside = _jax.jacobian_rows(
                    flat, leaves, holomorphic=holomorphic, allow_int=allow_int
                )
        else:  # `jax.jacrev` does not accept an empty list
            outputs, beside = flat([])
            rows = [[] for _ in outputs]
        if unconnected != "zero":
            rows = _mark_unconnected(call, flat, unconnected, rows)
        aux = call.settle(beside)
        structure, shapes = shape_of_result
        blocks = [
            call.answer(row, partial(zero_block, shape) if unconnected != "none" else none_for)
            for row, shape in zip(rows, shapes, strict=True)
        ]
        answer = jax.tree.unflatten(structure, blocks)
        return (answer, aux) if has_aux else answer

    return jacobian_of


# -------------------------------------------------------------------------------- unconnected


def _mark_unconnected(
    call: Partition,
    fun: Callable[[list[Any]], Any],
    unconnected: Unconnected,
    rows: list[list[Any]],
) -> list[list[Any]]:
    """Returns the derivatives (one row per output leaf), with None for each unconnected pair.
    Raises UnconnectedError instead for ``unconnected="raise"``."""
    program = _trace_call(call, fun)
    # The values that are assigned in modules come after the results.
    linked = connections(program)[: program.result_count]
    if unconnected == "raise":
        _require_connected(call, program, linked)
    return [
        [result if i in inputs else None for i, result in enumerate(row)]
        for row, inputs in zip(rows, linked, strict=True)
    ]


def _trace_call(call: Partition, fun: Callable[[list[Any]], Any]) -> Graph:
    def traced(leaves: list[Any]) -> Any:
        return fun(leaves)[0]

    traced.__name__ = function_name(call.fun)
    return graph(traced, call.leaves)


def _require_connected(call: Partition, program: Graph, linked: Sequence[frozenset[int]]) -> None:
    paths = call.names
    lines = []
    for output, inputs in enumerate(linked):
        if inputs.issuperset(range(len(paths))):
            continue
        whence = "" if len(linked) == 1 else f" from output {output}"
        cuts = smallest_cuts(program, [output])
        lines += [
            f"  {path}{whence}: {explain_unconnected(program, i, cuts[i])}"
            for i, path in enumerate(paths)
            if i not in inputs
        ]
    if lines:
        more = [f"  ... and {len(lines) - 20} more"] if len(lines) > 20 else []
        raise UnconnectedError(
            f"no gradient of {function_name(call.fun)} flows to\n" + "\n".join([*lines[:20], *more])
        )
