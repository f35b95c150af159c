"""Traces a gradient function when its custom gradient is called.

A gradient function may close over values of an enclosing trace. These values become operands of the
custom gradient: as operands they are differentiated, and do not outlive their trace.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from tracegrad import _jax


@dataclass(frozen=True)
class OpenedProgram:
    """A traced function whose closed-over tracers and arrays have become arguments.

    (To a tape, programs that close over different arrays are different functions.)
    """

    program: Any
    captured: tuple[int, ...]  # the positions of these arguments among the program's constants

    @classmethod
    def of(cls, program: Any) -> tuple[OpenedProgram, list[Any]]:
        """Returns a program without its closed-over values, and the values. The `OpenedProgram` may
        outlive the traces of the values."""
        constants = list(_jax.constants_of(program))
        captured = tuple(i for i, c in enumerate(constants) if _can_be_argument(c))
        values = [constants[i] for i in captured]
        for i in captured:
            constants[i] = None
        return cls(program.replace(consts=constants), captured), values

    def __call__(self, values: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        open_form, constants = _jax.parts_of(self.program)
        constants = list(constants)
        for i, value in zip(self.captured, values):
            constants[i] = value
        return list(jax.core.eval_jaxpr(open_form, constants, *arguments))


def _can_be_argument(constant: object) -> bool:
    """Whether a closed-over value is an array. A Ref stays in the program."""
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
    is being traced (a gradient function that calls itself would be traced without end). If the
    gradient function raises an error, `run` raises the error when a gradient is computed.
    """

    def run_untraced(captured: Any, *args: Any) -> Sequence[Any]:
        return gradient(*args)

    if _tracing.is_on:
        return run_untraced, []

    def run(*args: Any) -> Sequence[Any]:  # a new function: JAX caches traces by the function
        return gradient(*args)

    types = [jax.typeof(result).update(weak_type=False) for result in results]
    given = list(map(jax.typeof, inputs)), types, types
    _tracing.is_on = True
    try:
        program, shapes = jax.make_jaxpr(run, return_shape=True)(*given)
    except _jax.NEEDS_VALUES:
        return run_untraced, []
    except Exception as error:
        return functools.partial(_raise, error), []
    finally:
        _tracing.is_on = False
    traced, values = OpenedProgram.of(program)
    structure = jax.tree.structure(shapes)  # it has None for an input without a gradient

    def run_traced(captured: Any, *args: Sequence[Any]) -> Any:
        return jax.tree.unflatten(structure, traced(captured, [*chain(*args)]))

    return run_traced, values


def _raise(error: Exception, *_: Any) -> Sequence[Any]:
    raise error


def with_traced_gradient(
    run: Callable[..., list[Any]],
    gradient: Gradient,
    operands: Sequence[Any],
    results: Sequence[Any],
    marked: Callable[..., Any],
    count: int | None = None,
) -> list[Any]:
    """Calls ``run(*operands)``, with ``gradient(inputs, results, cotangents)`` as its gradient,
    traced.

    Args:
      results: arrays of the types of the results.
      marked: a function with a mark of `ir.frames`; the rule gets the same mark.
      count: the number of operands, from the first on, that are inputs of `gradient`; default: all.
        The other operands have no gradient.
    """
    pullback, captured = trace_gradient(gradient, operands[:count], results)

    @functools.wraps(run)
    def primal(operands: Any, captured: Any) -> list[Any]:
        return run(*operands)

    @functools.wraps(marked)
    def backward(residuals: Any, _: Any, cotangents: Any) -> Any:
        captured, inputs, outputs = residuals
        gradients = pullback(captured, inputs, outputs, instantiate_zeros(cotangents, outputs))
        return [*gradients, *[None] * (len(operands) - len(inputs))], None

    def keep(args: Any, outputs: Any) -> Any:
        operands, captured = args
        return captured, operands[:count], outputs

    return list(_jax.with_backward(primal, backward, keep)(list(operands), captured))


def instantiate_zeros(cotangents: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Replaces symbolic zeros, and cotangents of results without a gradient, by arrays of zeros."""
    return [
        ct if _jax.has_gradient(out) and not isinstance(ct, SymbolicZero) else jnp.zeros_like(out)
        for ct, out in zip(cotangents, results, strict=True)
    ]
