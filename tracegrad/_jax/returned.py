"""For which inputs a rule returned a gradient: what it returned as None gets none.

JAX keeps a None as a symbolic zero, from the rule to the inputs of whatever calls it: through
`jax.jit`, `jax.vmap`, `jax.checkpoint`, branches and `jax.shard_map` (a loop makes zeros of it). In
a traced program it is an array of zeros like any other, so it has to be asked for while JAX
differentiates: by a rule of our own around each input, which is told about symbolic zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from tracegrad._jax.arrays import has_gradient
from tracegrad._jax.custom_derivatives import with_cotangent, with_tangent
from tracegrad._jax.derivatives import Run, jvp, of_some, vjp_of_some


def returned_gradients(
    run: Run, avals: Sequence[Any], active: Sequence[int], outputs: Sequence[int]
) -> set[int]:
    """The inputs whose cotangents are no symbolic zeros in a VJP of a function.

    Args:
      run: the function, of a list of arrays to a list of arrays; it is traced.
      avals: the types of its inputs.
      active: the positions of those that are differentiated.
      outputs: the positions of the results that have cotangents; those of the others are symbolic
        zeros.

    Raises whatever JAX raises where it cannot differentiate the function.
    """
    met: set[int] = set()

    def backward(*args: Any) -> Any:
        def witnessed(operands: list[Any]) -> Any:
            for i in active:
                operands[i] = _with_witness(operands[i], i, met)
            return run(operands)

        results, pullback = vjp_of_some(witnessed, args, active, outputs)
        return pullback([jax.numpy.ones(out.shape, out.dtype) for out in results])

    jax.make_jaxpr(backward)(*avals)
    return met


def with_witnesses(values: Sequence[Any], first: int, met: set[int]) -> list[Any]:
    """The same values. Where they are differentiated, `met` gets the positions of those that have a
    cotangent, counted from `first`."""
    return [
        _with_witness(value, i, met) if has_gradient(value) else value
        for i, value in enumerate(values, first)
    ]


def _with_witness(value: Any, position: int, met: set[int]) -> Any:
    def witnessed(cotangent: Any) -> Any:
        if isinstance(cotangent, SymbolicZero):
            return None
        met.add(position)
        return cotangent

    return with_cotangent(witnessed, "witnessed", symbolic_zeros=True)(value)


def written_tangents(run: Run, avals: Sequence[Any], active: Sequence[int]) -> set[int]:
    """The results whose tangents are no symbolic zeros in a JVP of a function.

    Args, raises: as `returned_gradients`.
    """
    met: set[int] = set()

    def forward(*args: Any) -> Any:
        def along(*chosen: Any) -> list[Any]:
            results = of_some(run, args, active)(*chosen)
            return [
                with_witness_of_tangent(out, functools.partial(met.add, j))
                for j, out in enumerate(results)
                if has_gradient(out)
            ]

        primals = tuple(args[i] for i in active)
        return jvp(along, primals, tuple(map(jax.numpy.ones_like, primals)))

    jax.make_jaxpr(forward)(*avals)
    return met


def with_witness_of_tangent(value: Any, told: Callable[[], object]) -> Any:
    """The same value. `told` is called where the value has a tangent that is no symbolic zero."""

    def tangent(_: Any, tangents: Any) -> Any:
        told()
        return tangents[0]

    return with_tangent(lambda value: value, tangent, "witnessed")(value)
