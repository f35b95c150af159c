"""What XLA holds for the gradient of a program: it is compiled, and nobody runs it.

What was compiled is not what the user's first call runs: that has a gradient with respect to other
arguments, the value beside it, or an optimizer behind it, and is compiled as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Graph, Value
from tracegrad.lowering.evaluate import evaluate
from tracegrad.planning.found import FOUND


class NotMeasuredError(Exception):
    """A program could not be compiled here, by itself."""


def temporary_bytes(compiled: Any) -> int:
    """Bytes that a compiled program needs at once beside its arguments and results, on each device.

    Raises NotMeasuredError if the backend does not say.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise NotMeasuredError(f"{_jax.compiled_by()} does not say what a program holds")
    return int(analysis.temp_size_in_bytes)


def shardings_of(program: Graph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """How the arguments of a program lie on devices, by its inputs; None for those on one."""
    found = list(map(_jax.sharding_of, jax.tree.leaves((args, kwargs))))
    others = len(program.inputs) - len(found)  # Variables
    return [*found, *[None] * others] if others >= 0 else [None] * len(program.inputs)


class Gradient:
    """The gradients of a program and of others that compute the same, as XLA holds them.

    Args:
      active: the values of the program that get a cotangent.
      shardings: of its inputs, where known: then bytes are those of one device.
    """

    def __init__(
        self, program: Graph, active: Collection[Value], shardings: Sequence[Any] | None = None
    ):
        placed = zip(program.inputs, shardings or [None] * len(program.inputs), strict=True)
        self._active = [i for i, value in enumerate(program.inputs) if value in active]
        self._shapes = [_jax.placed(v.aval, sharding) for v, sharding in placed]
        self._cotangents = [_jax.placed(v.aval) for v in program.outputs if v.has_gradient]
        self._is_loss = [shape.shape for shape in self._cotangents] == [()]

    def held(self, program: Graph) -> int:
        """Bytes that XLA needs at once for the gradient, beside arguments and results.

        Raises NotMeasuredError if it cannot be compiled by itself.
        """
        options = _jax.keep_recompute_options(jax.default_backend()) if program.recomputes else None
        try:
            traced = [v for v, array in program.constants.items() if _jax.is_tracer(array)]
            shapes = [*self._shapes, *(_jax.placed(v.aval) for v in traced)]
            given = [] if self._is_loss else self._cotangents
            gradient = self._of(program, traced)
            lowered = jax.jit(gradient, compiler_options=options).lower(shapes, given)
            key = (
                "held",
                hashlib.sha256(lowered.as_text().encode()).hexdigest(),
                f"{_jax.compiled_by()} {options}",
            )
            known: int | None = FOUND.get(key)
            if known is None:
                known = FOUND.put(key, temporary_bytes(lowered.compile()))
        except NotMeasuredError:
            raise
        except Exception as error:  # whatever JAX or XLA cannot do with a part of a program
            raise NotMeasuredError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        return known

    def _of(self, program: Graph, traced: Sequence[Value]) -> Callable[..., Any]:
        """The gradients with respect to arguments, and to what another trace has: `traced`."""
        count = len(program.inputs)
        floats = [count + k for k, v in enumerate(traced) if v.has_gradient]
        active = [*self._active, *floats]
        flowing = [i for i, v in enumerate(program.outputs) if v.has_gradient]

        def gradient(operands: list[Any], given: list[Any]) -> Any:
            def run(operands: list[Any]) -> list[Any]:
                here = program.copy() if traced else program
                mine = dict(zip(program.constants, list(here.constants), strict=True))
                for value, array in zip(traced, operands[count:], strict=True):
                    here.set_constant(mine[value], array)
                return evaluate(here, operands[:count])

            _, pull = _jax.vjp_of_some(run, operands, active, flowing)
            # That of a loss is one, as in `jax.grad`.
            cotangents = [jnp.ones((), self._cotangents[0].dtype)] if self._is_loss else given
            return pull(cotangents)

        gradient.__name__ = gradient.__qualname__ = program.name
        return gradient
