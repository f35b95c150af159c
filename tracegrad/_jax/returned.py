"""For which inputs a rule returned a gradient: what it returned as None gets none.

JAX keeps a None as a symbolic zero, from the rule to the inputs of whatever calls it: through
`jax.jit`, `jax.vmap`, `jax.checkpoint`, branches and `jax.shard_map` (a loop makes zeros of it). In
a traced program it is an array of zeros like any other, so it has to be asked for while JAX
differentiates: by a rule of our own around each input, which is told about symbolic zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from tracegrad._jax.arrays import has_gradient
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
    @jax.custom_vjp
    def witnessed(value: Any) -> Any:
        return value

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        if isinstance(cotangent, SymbolicZero):
            return (None,)
        met.add(position)
        return (cotangent,)

    witnessed.defvjp(lambda value: (value.value, None), backward, symbolic_zeros=True)
    return witnessed(value)


def written_tangents(run: Run, avals: Sequence[Any], active: Sequence[int]) -> set[int]:
    """The results whose tangents are no symbolic zeros in a JVP of a function.

    Args, raises: as `returned_gradients`.
    """
    met: set[int] = set()

    def forward(*args: Any) -> Any:
        def along(*chosen: Any) -> list[Any]:
            results = of_some(run, args, active)(*chosen)
            return [
                _with_witness_of_tangent(out, j, met)
                for j, out in enumerate(results)
                if has_gradient(out)
            ]

        primals = tuple(args[i] for i in active)
        return jvp(along, primals, tuple(map(jax.numpy.ones_like, primals)))

    jax.make_jaxpr(forward)(*avals)
    return met


def _with_witness_of_tangent(value: Any, position: int, met: set[int]) -> Any:
    @jax.custom_jvp
    def witnessed(value: Any) -> Any:
        return value

    def rule(primals: Any, tangents: Any) -> Any:  # not called for symbolic zeros
        met.add(position)
        return primals[0], tangents[0]

    witnessed.defjvp(rule, symbolic_zeros=True)
    return witnessed(value)
