"""Forward mode, also through custom gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.rewriting.forward_mode import with_forward_mode
from tracegrad.tracing import to_callable
from tracegrad.tracing.graphs import graph
from tracegrad.tracing.in_force import differentiating, traced_in_force, under_rules_already
from tracegrad.variables.parted import Parted
from tracegrad.variables.statics import are_traced, is_none, name_of_leaf, with_statics
from tracegrad.variables.trees import without_variables


def jvp(
    fun: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: bool = False,
) -> Any:
    """The value of a function, and its derivative along a direction, in one pass forward.

    As `jax.jvp`, save that a custom gradient (`jax.custom_vjp`, `tracegrad.custom_gradient`), which
    `jax.jvp` refuses, gets the transpose of its backward: so forward and reverse mode agree.

    Args:
      fun: a traced or plain function of pytrees of arrays; takes what `jax.jit` takes.
      primals: a tuple of its arguments.
      tangents: a tuple of directions, of the structure, shapes and dtypes of `primals` (``float0``
        for integers). None stands for zeros, and for the direction of what is no array, as in
        `equinox.filter_jvp`.
      has_aux: whether `fun` returns ``(outputs, aux)``, where ``aux`` is handed on.

    Returns:
      ``(outputs, output_tangents)``, or ``(outputs, output_tangents, aux)``; the tangent of what
      is no array in the outputs is None. It can itself be differentiated, batched and compiled. It
      traces `fun` at every call: put `tracegrad.trace` or `jax.jit` around what is called often.
      Complex tangents follow JAX's convention.

    Raises:
      TypeError, ValueError: as `jax.jvp`, for tangents that do not fit.
      ValueError: the backward of a custom gradient on the way is not linear in its cotangent (it
        clips it, or takes its sign), and so has no transpose; the message names it and its line.

    The idea is that of TensorFlow's ``tf.autodiff.ForwardAccumulator``.

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
    program = traced_in_force(lambda: graph(fun, *primals))
    run = under_rules_already(to_callable(with_forward_mode(program)))
    structure: Any
    given: Any
    values, structure = jax.tree.flatten(primals, is_leaf=is_none)
    directions, given = jax.tree.flatten(tangents, is_leaf=is_none)
    if structure != given:
        return _jax.jvp(run, primals, tangents, has_aux=has_aux)  # says what is wrong
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
    with differentiating():
        outputs, out_tangents, aux = _jax.jvp(along, (starts,), (steps,), has_aux=True)
    leaves, tree = jax.tree.flatten(out_tangents)  # what is no array stands in both
    kept = zip(leaves, are_traced(leaves, tree), strict=True)
    out_tangents = jax.tree.unflatten(tree, [leaf if is_kept else None for leaf, is_kept in kept])
    return (outputs, out_tangents, aux) if has_aux else (outputs, out_tangents)
