"""Finds the inputs for which custom rules return a gradient, not None.

If a rule returns None, JAX makes a symbolic zero, and passes the symbolic zero on to the inputs of
the callers: through `jax.jit`, `jax.vmap`, `jax.checkpoint`, branches and `jax.shard_map` (a loop
makes an array of zeros). In the traced program a symbolic zero looks like any array of zeros, so a
*witness* observes it while JAX differentiates: an identity function around each input, whose
transpose JAX does not call for a symbolic zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad._jax.arrays import has_gradient
from tracegrad._jax.custom_derivatives import with_tangent
from tracegrad._jax.derivatives import Run, jvp, of_some, vjp_of_some
from tracegrad._jax.primitives import with_cotangent_alone


def returned_gradients(
    run: Run, avals: Sequence[Any], active: Sequence[int], outputs: Sequence[int]
) -> set[int]:
    """Returns the positions of the inputs whose cotangents are not symbolic zeros in a VJP of a
    function.

    Args:
      run: the function, from a list of arrays to a list of arrays, to be traced.
      avals: the types of its inputs.
      active: the positions of the inputs that are differentiated.
      outputs: the positions of the results that have cotangents; the other results have symbolic
        zeros.

    Raises JAX's error if JAX cannot differentiate the function.
    """
    seen: set[int] = set()

    def backward(*args: Any) -> Any:
        def run_witnessed(operands: list[Any]) -> Any:
            for i in active:
                operands[i] = with_witness(operands[i], i, seen)
            return run(operands)

        results, pullback = vjp_of_some(run_witnessed, args, active, outputs)
        return pullback([jax.numpy.ones(out.shape, out.dtype) for out in results])

    jax.make_jaxpr(backward)(*avals)
    return seen


def with_witness(value: Any, position: int, seen: set[int]) -> Any:
    """Puts a witness around a value; the witness adds `position` to `seen` when a cotangent that is
    no symbolic zero comes back to the value."""

    def observe(cotangent: Any) -> Any:
        seen.add(position)
        return cotangent

    return with_cotangent_alone(observe)(value)


def written_tangents(run: Run, avals: Sequence[Any], active: Sequence[int]) -> set[int]:
    """Returns the positions of the results whose tangents are not symbolic zeros in a JVP of a
    function.

    Arguments and errors: see `returned_gradients`.
    """
    seen: set[int] = set()

    def forward(*args: Any) -> Any:
        def run_witnessed(*chosen: Any) -> list[Any]:
            results = of_some(run, args, active)(*chosen)
            return [
                with_witness_of_tangent(out, functools.partial(seen.add, j))
                for j, out in enumerate(results)
                if has_gradient(out)
            ]

        primals = tuple(args[i] for i in active)
        return jvp(run_witnessed, primals, tuple(map(jax.numpy.ones_like, primals)))

    jax.make_jaxpr(forward)(*avals)
    return seen


def with_witness_of_tangent(value: Any, report: Callable[[], object]) -> Any:
    """Puts a witness around the value; the witness calls `report` if the value has a tangent that
    is no symbolic zero."""

    def tangent(_: Any, tangents: Any) -> Any:
        report()
        return tangents[0]

    return with_tangent(lambda value: value, tangent, "witnessed")(value)
