"""`grad_pass_through`: a function with the gradient of the identity (straight-through)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.annotations.calls import (
    AnnotatedFunction,
    input_names,
    inputs_in,
    require_callable,
)
from tracegrad.annotations.custom_gradient import custom_gradient
from tracegrad.annotations.variables import Assignments
from tracegrad.ir.frames import CHANGES_GRADIENT
from tracegrad.ir.wording import described
from tracegrad.variables.trees import without_variables
from tracegrad.variables.variable import Variable

P = ParamSpec("P")
R = TypeVar("R")


@overload
def grad_pass_through(f: Callable[P, R]) -> AnnotatedFunction[P, R]: ...
@overload
def grad_pass_through(f: None = None) -> Callable[[Callable[P, R]], AnnotatedFunction[P, R]]: ...
def grad_pass_through(f: Any = None) -> Any:
    """Keeps the values of a function and replaces its gradient by the gradient of the identity.

    Arguments:
        f: a function with as many output arrays as inputs (the array leaves of its positional
            arguments, as in `custom_gradient`). Each output has the shape of the input with the
            same position. Give other arrays by keyword, as constants: ``book=stop_gradient(book)``.

    Returns:
        A function with the values of ``f``. The gradient of each input is the cotangent of the
        output with the same position, converted to the input's dtype. Its ``__wrapped__`` is ``f``.
        Use it as ``@grad_pass_through`` or ``@grad_pass_through()``, also on methods.

    Raises:
        ValueError: on a call, if the numbers or the shapes of outputs and inputs differ; under
            differentiation, if the result depends on a differentiated value that ``f`` closes
            over or gets by keyword.
        TypeError: on a call, if the cotangent of an output cannot be the gradient of its input: for
            example, the output of a real input is an integer or complex.

    >>> import jax, jax.numpy as jnp
    >>> quantise = grad_pass_through(jnp.round)
    >>> print(quantise(1.7), jax.grad(lambda x: quantise(x) ** 2)(1.7))
    2.0 4.0

    As ``tf.grad_pass_through``. The idea: Bengio, Léonard and Courville, "Estimating or
    propagating gradients through stochastic neurons for conditional computation", 2013.
    """
    if f is None:
        return grad_pass_through
    require_callable(f, "grad_pass_through")
    return AnnotatedFunction(f, _call)


@CHANGES_GRADIENT
def _call(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assignments = Assignments()

    @functools.wraps(fun)
    def with_identity(*args: Any, **kwargs: Any) -> tuple[Any, Callable[..., Any]]:
        # The values that the function assigns to Variables are outputs of the rule too: otherwise
        # they could not leave the trace of the rule.
        y, assigned = assignments.run(lambda: without_variables(fun(*args, **kwargs)))
        outputs = [jax.typeof(leaf) for leaf in jax.tree.leaves(y)]
        inputs = [jax.typeof(array) for array in inputs_in(args).chosen]
        _check_shapes(fun, input_names(fun, args), inputs, outputs)

        def identity(*dys: Any, variables: Sequence[Variable] = ()) -> Any:
            gradients = [
                dy.astype(aval.dtype) if _jax.has_gradient(aval) else None
                for dy, aval in zip(dys, inputs)  # more dys: those of assigned values
            ]
            return (gradients, [None for _ in variables]) if variables else gradients

        return (y, assigned), identity

    y, values = custom_gradient(with_identity)(*args, **kwargs)
    assignments.assign(values)
    return y


def _check_shapes(fun: Any, names: list[str], inputs: list[Any], outputs: list[Any]) -> None:
    if len(inputs) != len(outputs):
        raise ValueError(
            f"{described(fun)} passes the gradients of its outputs on to its inputs, so it must "
            f"have as many outputs as inputs; it has {len(outputs)} and {len(inputs)} "
            f"({', '.join(names) or 'no arrays'}). Give the inputs "
            "without an output by keyword, as constants: name=stop_gradient(name)."
        )
    for i, (name, given, got) in enumerate(zip(names, inputs, outputs)):
        passes = f"{described(fun)} passes the gradient of its output {i} on to its input {name}"
        types = f"the output is {_jax.type_text(got)}, the input {_jax.type_text(given)}"
        if got.shape != given.shape:
            raise ValueError(f"{passes}, so their shapes must be the same; {types}.")
        if _jax.has_gradient(given) and not _same_kind(given.dtype, got.dtype):
            raise TypeError(
                f"{passes}; {types}. Return the output as {given.dtype}, so that its cotangent "
                "can be the gradient of the input."
            )


def _same_kind(one: Any, other: Any) -> bool:
    return any(
        jnp.issubdtype(one, kind) and jnp.issubdtype(other, kind)
        for kind in (jnp.floating, jnp.complexfloating)
    )
