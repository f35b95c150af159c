"""`jvp`: forward mode, also through custom gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.rewriting.forward_mode import with_forward_mode
from tracegrad.tracing import to_callable
from tracegrad.tracing.graphs import function_name, graph
from tracegrad.tracing.in_force import under_rules, without_editing
from tracegrad.tracing.parted import Parted
from tracegrad.tracing.statics import are_traced, is_none, name_of_leaf, with_statics
from tracegrad.variables.trees import without_variables


def jvp(
    fun: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: bool = False,
) -> Any:
    """Returns the value of a function and its derivative along a direction, in one forward pass.

    Unlike `jax.jvp`, this function accepts custom gradients (`jax.custom_vjp`,
    `tracegrad.custom_gradient`). The forward derivative of a custom gradient is the transpose of
    its backward function, so forward and reverse mode agree.

    Args:
      fun: a traced or plain function of pytrees of arrays, of any arguments that `jax.jit` takes.
      primals: a tuple of the arguments of `fun`.
      tangents: a tuple of directions, with the structure, shapes and dtypes of `primals`
        (``float0`` for integers). None means zeros; the tangent of a leaf that is not an array
        must be None, as in `equinox.filter_jvp`.
      has_aux: whether `fun` returns ``(outputs, aux)``; ``aux`` is returned unchanged.

    Returns:
      ``(outputs, output_tangents)``, or ``(outputs, output_tangents, aux)``. The tangent of an
      output leaf that is not an array is None. A call of `jvp` can be differentiated, batched and
      compiled. Each call traces `fun`: wrap a function that calls `jvp` often in `tracegrad.trace`
      or `jax.jit`. Complex tangents follow JAX's convention.

    Raises:
      TypeError, ValueError: the tangents do not fit the primals, as in `jax.jvp`.
      ValueError: the backward of a custom gradient in `fun` is not linear in its cotangent (it
        clips the cotangent, or takes its sign), and so has no transpose. The message names the
        custom gradient and its line.

    The model is TensorFlow's ``tf.autodiff.ForwardAccumulator``.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> from tracegrad import jvp
    >>> @tg.custom_gradient
    ... def straight_through(x):
    ...     return jnp.round(x), lambda dy: dy
    >>> y, dy = jvp(lambda x: straight_through(x) ** 2, (1.6,), (1.0,))
    >>> print(y, dy)
    4.0 4.0
    """
    if not isinstance(primals, (tuple, list)) or not isinstance(tangents, (tuple, list)):
        raise TypeError(
            "primals and tangents are tuples, with one entry per argument; got "
            f"{type(primals).__name__} and {type(tangents).__name__}"
        )
    primals, tangents = without_variables(tuple(primals)), tuple(tangents)
    edited = under_rules(fun, function_name(fun), forward=True)
    with without_editing():
        run = to_callable(with_forward_mode(graph(edited, *primals)))
    structure: Any
    given: Any
    values, structure = jax.tree.flatten(primals, is_leaf=is_none)
    directions, given = jax.tree.flatten(tangents, is_leaf=is_none)
    if structure != given:
        return _jax.jvp(run, primals, tangents, has_aux=has_aux)  # raises JAX's error
    parts = Parted(values, structure, [direction is not None for direction in directions])
    traced = are_traced(values, structure)
    for i, is_moving in enumerate(parts.counted):
        if is_moving and not traced[i]:
            raise TypeError(
                f"{name_of_leaf(structure, i, 'primals')} is {values[i]!r}, which is no array: its "
                f"tangent is None, not {directions[i]!r}"
            )

    def along(moved: list[Any]) -> Any:
        outputs = run(*parts.combine(moved))
        outputs, aux = outputs if has_aux else (outputs, None)
        return with_statics(outputs), aux

    starts, steps = parts.chosen, parts.of_chosen(directions)
    with without_editing():
        outputs, out_tangents, aux = _jax.jvp(along, (starts,), (steps,), has_aux=True)
    leaves, tree = jax.tree.flatten(out_tangents)  # leaves that are not arrays are in both results
    kept = zip(leaves, are_traced(leaves, tree), strict=True)
    out_tangents = jax.tree.unflatten(tree, [leaf if is_kept else None for leaf, is_kept in kept])
    return (outputs, out_tangents, aux) if has_aux else (outputs, out_tangents)
