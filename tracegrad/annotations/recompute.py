"""`recompute_grad`: a function whose intermediate values the backward pass recomputes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax

from tracegrad.annotations.calls import (
    AnnotatedFunction,
    input_names,
    inputs_in,
    require_callable,
    take_users_name,
)
from tracegrad.annotations.module_changes import refuse_changes
from tracegrad.annotations.variables import Assignments
from tracegrad.ir.notes import add_note
from tracegrad.ir.wording import brief, described
from tracegrad.tracing import graph
from tracegrad.tracing.user_errors import explain_rule
from tracegrad.variables.reading import ReadsOutside
from tracegrad.variables.trees import without_variables

P = ParamSpec("P")
R = TypeVar("R")


@overload
def recompute_grad(
    f: Callable[P, R], *, policy: Callable[..., Any] | None = None
) -> AnnotatedFunction[P, R]: ...
@overload
def recompute_grad(
    f: None = None, *, policy: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], AnnotatedFunction[P, R]]: ...
def recompute_grad(f: Any = None, *, policy: Callable[..., Any] | None = None) -> Any:
    """Keeps only the arguments of ``f`` for the backward pass, which then runs ``f`` again.

    Recomputation costs one more run of ``f`` per gradient. Between the forward and the backward
    pass, it frees the memory of the values computed in ``f``.

    Arguments:
        f: a function of pytrees of arrays, by position or by keyword. Array and floating point
            leaves are traced and can be differentiated; Python ints, bools, strings, None,
            functions and other objects stay Python values.
        policy: chooses the intermediate values to keep, one of ``jax.checkpoint_policies``; None
            keeps no value.

    Returns:
        A function with the results of ``f`` and its derivatives of every order, in reverse and
        forward mode; its ``__wrapped__`` is ``f``. Usable bare, with parentheses and on methods.
        Values that ``f`` closes over have gradients too, and are kept for the backward pass.
        Variables that ``f`` closes over and assigns are assigned once. (A Variable among the
        arguments is an array in ``f``.) A side effect that may happen twice
        (`jax.debug.print`) happens again when ``f`` is recomputed, also under a `GradientTape`.

    Raises:
        TypeError: ``f`` or ``policy`` is not callable; or, on a call, ``f`` changes a module of
            flax.nnx among its arguments: use `nnx.remat`.
        NotImplementedError: on a call, if ``f`` has a side effect that may not happen twice
            (``io_callback``).

    >>> import jax, jax.numpy as jnp
    >>> @recompute_grad
    ... def block(w, x, *, depth=2):
    ...     for _ in range(depth):
    ...         x = jnp.tanh(w * x)
    ...     return x
    >>> print(block(1.0, 0.0, depth=3), jax.grad(block, argnums=1)(2.0, 0.0, depth=3))
    0.0 8.0

    It corresponds to ``tf.recompute_grad``; each call is a ``jax.checkpoint``. With JAX before
    0.11.2, XLA for CPUs undoes the recomputation in programs compiled by ``jax.jit``; programs
    compiled by tracegrad's ``trace`` do recompute.
    """
    if f is None:
        return functools.partial(recompute_grad, policy=policy)
    require_callable(f, "recompute_grad")
    if policy is not None and not callable(policy):
        raise TypeError(
            "recompute_grad takes a policy of jax.checkpoint_policies, "
            f"for example jax.checkpoint_policies.dots_saveable; it was given {brief(policy)}."
        )
    return AnnotatedFunction(f, functools.partial(_call, policy))


def _call(
    policy: Callable[..., Any] | None,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    arguments = inputs_in((args, kwargs))
    variables, assignments = ReadsOutside(), Assignments()

    # A new function for every call: JAX caches the program of a function, with the values that the
    # function closed over when it was first traced.
    def run(*arrays: Any) -> Any:
        positional, keywords = copies = arguments.combine(arrays)

        def call() -> Any:
            return without_variables(fun(*positional, **keywords))

        with variables.around():
            return assignments.run(
                lambda: refuse_changes(fun, copies, call, "use flax.nnx.remat, which keeps it")
            )

    try:
        program = take_users_name(fun, run, input_names(fun, args, kwargs))
        result, assigned = jax.checkpoint(program, policy=policy)(*arguments.chosen)
    except Exception as error:
        explain_rule(error, lambda: graph(lambda *arrays: run(*arrays), *arguments.chosen))
        add_note(error, f"in {described(fun)}, which is recomputed in the backward pass")
        if isinstance(error, NotImplementedError) and "ffects not supported" in str(error):
            add_note(
                error,
                "recompute_grad runs it once more for a gradient, so a side effect in it would "
                "happen twice: move the io_callback out of it, or use jax.debug.callback, which "
                "may run again, or jax.pure_callback, which has no side effect.",
            )
        raise
    assignments.assign(assigned)
    return result
