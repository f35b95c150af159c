"""Forward mode, also through custom gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad.rewriting.forward_mode import with_forward_mode
from tracegrad.tracing import to_callable
from tracegrad.tracing.graphs import graph
from tracegrad.tracing.in_force import apply_in_force, under_rules_already


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
        for integers).
      has_aux: whether `fun` returns ``(outputs, aux)``, where ``aux`` is handed on.

    Returns:
      ``(outputs, output_tangents)``, or ``(outputs, output_tangents, aux)``. It can itself be
      differentiated, batched and compiled. It traces `fun` at every call: put `tracegrad.trace`
      or `jax.jit` around what is called often. Complex tangents follow JAX's convention.

    Raises:
      TypeError, ValueError: as `jax.jvp`, for tangents that do not fit.
      ValueError: the backward of a custom gradient on the way is not linear in its cotangent (it
        clips it, or takes its sign), and so has no transpose; the message names it and its line.

    The idea is that of TensorFlow's ``tf.autodiff.ForwardAccumulator``.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> from tracegrad.differentiation import jvp
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
    run = under_rules_already(to_callable(with_forward_mode(apply_in_force(graph(fun)(*primals)))))
    return jax.jvp(run, tuple(primals), tuple(tangents), has_aux=has_aux)
