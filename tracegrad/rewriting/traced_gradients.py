"""Traces gradient functions when they are defined, if they close over values of a trace.

A gradient function may close over values of an enclosing trace. These values become operands of its
custom gradient: as operands they are differentiated, and do not outlive their trace.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from tracegrad import _jax


@dataclass(frozen=True)
class OpenedProgram:
    """A traced function whose closed-over tracers and arrays have become arguments.

    (A tape would take programs that close over different arrays for different functions.)
    """

    program: Any
    captured: tuple[int, ...]  # the positions of these arguments among the program's constants

    @classmethod
    def of(cls, program: Any) -> tuple[OpenedProgram, list[Any]]:
        """Splits a program into an `OpenedProgram` without the closed-over values, and the values.
        The `OpenedProgram` may outlive the traces of the values."""
        constants = list(_jax.constants_of(program))
        captured = tuple(i for i, c in enumerate(constants) if _can_be_argument(c))
        values = [constants[i] for i in captured]
        for i in captured:
            constants[i] = None
        return cls(program.replace(consts=constants), captured), values

    def __call__(self, values: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        open_form, constants = _jax.parts_of(self.program)
        given = list(constants)
        for i, value in zip(self.captured, values):
            given[i] = value
        return list(jax.core.eval_jaxpr(open_form, given, *arguments))


def _can_be_argument(constant: object) -> bool:
    """Whether a closed-over value is an array, and not a Ref, which stays in the program."""
    is_array = isinstance(constant, jax.Array | np.ndarray)
    return is_array and isinstance(jax.typeof(constant), jax.core.ShapedArray)


# ``gradient(inputs, results, cotangents)``: one array or None for each input.
Gradient = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]


class _Tracing(threading.local):
    is_on = False


_tracing = _Tracing()


def trace_gradient(
    gradient: Gradient, inputs: Sequence[Any], results: Sequence[Any]
) -> tuple[Callable[..., Sequence[Any]], list[Any]]:
    """Returns a function ``run(captured, inputs, results, cotangents)``, and the values `captured`
    that the gradient function closes over.

    The gradient function is not traced if it needs concrete values, or if another gradient function
    is being traced (a gradient function may call itself without end). If the gradient function
    raises an error, `run` raises that error, when a gradient is computed.
    """

    def untraced(captured: Any, *given: Any) -> Sequence[Any]:
        return gradient(*given)

    if _tracing.is_on:
        return untraced, []
    is_given: list[bool] = []

    def flat(*given: Any) -> list[Any]:
        found = gradient(*given)
        is_given[:] = [each is not None for each in found]
        return [each for each in found if each is not None]

    types = [jax.typeof(result).update(weak_type=False) for result in results]
    _tracing.is_on = True
    try:
        program = jax.make_jaxpr(flat)(list(map(jax.typeof, inputs)), types, types)
    except _jax.NEEDS_VALUES:
        return untraced, []
    except Exception as error:
        return functools.partial(_raise, error), []
    finally:
        _tracing.is_on = False
    traced, values = OpenedProgram.of(program)

    def run(captured: Any, *given: Sequence[Any]) -> Sequence[Any]:
        found = iter(traced(captured, [leaf for part in given for leaf in part]))
        return [next(found) if each else None for each in is_given]

    return run, values


def _raise(error: Exception, *_: Any) -> Sequence[Any]:
    raise error


def with_traced_gradient(
    run: Callable[..., list[Any]],
    gradient: Gradient,
    operands: Sequence[Any],
    results: Sequence[Any],
    known_by: Callable[..., Any],
    count: int | None = None,
) -> list[Any]:
    """Calls ``run(*operands)``, with ``gradient(inputs, results, cotangents)`` as its gradient,
    traced.

    Args:
      results: arrays of the types of the results.
      known_by: the function whose mark (`ir.frames`) the rule gets.
      count: the number of operands, from the first on, that are inputs of `gradient`; default: all.
        The other operands have no gradient.
    """
    pullback, captured = trace_gradient(gradient, operands[:count], results)

    @functools.wraps(run)
    def primal(operands: Any, captured: Any) -> list[Any]:
        return run(*operands)

    @functools.wraps(known_by)
    def backward(kept: Any, _: Any, cotangents: Any) -> Any:
        captured, inputs, outputs = kept
        found = pullback(captured, inputs, outputs, dense(cotangents, outputs))
        return [*found, *[None] * (len(operands) - len(inputs))], None

    def keep(given: Any, outputs: Any, _: Any) -> Any:
        operands, captured = given
        return captured, operands[:count], outputs

    return list(_jax.with_backward(primal, backward, keep)(list(operands), captured))


def dense(cotangents: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Replaces symbolic zeros, and cotangents of results without a gradient, by arrays of zeros."""
    return [
        ct if _jax.has_gradient(out) and not isinstance(ct, SymbolicZero) else jnp.zeros_like(out)
        for ct, out in zip(cotangents, results, strict=True)
    ]
