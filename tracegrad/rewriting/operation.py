"""The argument `op` of a gradient function `grad(op, *dys)`, and the check of its results.

The gradient functions of overridden gradients, of registered gradients, and of NumPy functions all
have this form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.ir.occurrence import at
from tracegrad.ir.wording import brief, counted, described


@runtime_checkable
class StandsForArray(Protocol):
    """An object that a gradient function may return instead of an array: `IndexedSlices`."""

    def dense_as(self, aval: Any) -> Any:
        """Returns the array, as the gradient of an array of the type `aval`."""


@dataclass(frozen=True, eq=False, repr=False)
class GradientOperation:
    """The operation whose gradient a gradient function computes.

    `inputs` and `outputs` are its arrays, `params` its other parameters, `name` its name. The model
    is ``tf.Operation`` in a gradient function of TensorFlow.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    params: Mapping[str, Any]
    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))

    def __repr__(self) -> str:
        inputs, outputs = (
            ", ".join(_jax.type_text(jax.typeof(value)) for value in values)
            for values in (self.inputs, self.outputs)
        )
        return f"<GradientOperation {self.name}({inputs}) -> ({outputs})>"


def check_cotangents(
    answer: Any, op: GradientOperation, where: object, grad: Callable[..., Any]
) -> tuple[Any, ...]:
    """Checks the result of a gradient function; returns, for each input, an array of its shape and
    dtype, or None.

    `answer` is a sequence of one array (or number, or None) per input; for a single input also the
    array alone. The entry for an input that has no gradient, such as an integer, is ignored.
    `where`, an `Origin` or words, and `grad` are for messages.

    Raises ValueError for a wrong number of gradients or a wrong shape, and TypeError for a wrong
    dtype, or for a gradient that is not an array.
    """
    given = list(answer) if isinstance(answer, tuple | list) else [answer]

    def function() -> str:
        return f" {described(grad)} of {op.name}{at(where)}"

    if len(given) != len(op.inputs):
        types = ", ".join(_jax.type_text(jax.typeof(value)) for value in op.inputs)
        raise ValueError(
            f"The gradient function{function()} returned {counted(len(given), 'gradient')} for "
            f"{counted(len(op.inputs), 'input')} ({types or 'no arrays'}). Return one per input, "
            "or None for an input that has no gradient."
        )

    def checked(i: int) -> Any:
        aval = jax.typeof(op.inputs[i])
        return check_cotangent(given[i], aval, function, lambda: f"input {i}")

    return tuple(map(checked, range(len(given))))


def check_cotangent(
    gradient: Any,
    expected: Any,
    function: Callable[[], str],
    name: Callable[[], str],
) -> Any:
    """Returns a gradient as an array of the type of its input; None if there is no gradient.

    For messages, `function` returns the gradient function and its owner, as in ``" 'grad' (a.py:1)
    of mod"``, and `name` the user's name for the input. Raises ValueError or TypeError as
    `check_cotangents`.
    """
    if gradient is None or not _jax.has_gradient(expected):
        return None  # an integer input has no gradient, whatever was returned for it

    def problem(got: str, advice: str) -> str:
        return (
            f"The gradient function{function()} returned {got} for the {name()}, which is "
            f"{_jax.type_text(expected)}. {advice}"
        )

    try:
        is_array = not isinstance(gradient, StandsForArray)
        array = jnp.asarray(gradient) if is_array else gradient.dense_as(expected)
    except (TypeError, ValueError):
        message = problem(brief(gradient), "Return an array of that type, or None.")
        raise TypeError(message) from None
    got = jax.typeof(array)
    if got.shape != expected.shape:
        raise ValueError(
            problem(
                f"a gradient {_jax.type_text(got)}",
                "A gradient has the shape of its input: sum over axes that were broadcast.",
            )
        )
    if got.dtype == expected.dtype:
        return array
    complex_for_real = jnp.iscomplexobj(array) and jnp.issubdtype(expected.dtype, np.floating)
    if got.weak_type and not complex_for_real:  # a Python number takes the dtype of its input
        return array.astype(expected.dtype)
    raise TypeError(
        problem(
            f"a gradient {_jax.type_text(got)}",
            f"A gradient has the dtype of its input: convert it, .astype('{expected.dtype}').",
        )
    )
