"""The gradient of a graph, as a function: what JAX is given to compile or to write down."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Graph, Value, dtype_of, has_gradient
from tracegrad.ir.running import run_graph


def with_operands(
    program: Graph, constants: Sequence[Value], run: Callable[..., Any] = run_graph
) -> Callable[[Sequence[Any]], Any]:
    """A program as a function of its inputs, and of some of its constants behind them.

    `run`: what runs a graph on its inputs.
    """
    count = len(program.inputs)

    def with_constants(operands: Sequence[Any]) -> Any:
        given = dict(zip(constants, operands[count:], strict=True))
        here = program.replace(constants={**program.constants, **given}) if given else program
        return run(here, operands[:count])

    return with_constants


def gradient_of(
    program: Graph,
    constants: Sequence[Value],
    active: Sequence[int],
    run: Callable[..., Any] = run_graph,
) -> Callable[[list[Any], list[Any]], Any]:
    """The gradients with respect to the operands of `with_operands` at some positions; of a loss
    without a cotangent, as in `jax.grad`."""
    flowing = [i for i, value in enumerate(program.outputs) if has_gradient(value)]

    def gradient(operands: list[Any], given: list[Any]) -> Any:
        given_all = with_operands(program, constants, run)
        _, pull = _jax.vjp_of_some(given_all, operands, active, flowing)
        return pull(given or [jnp.ones((), dtype_of(program.outputs[i])) for i in flowing])

    name = program.name
    if run is not run_graph:  # JAX caches what is compiled, and we do, by all but its scopes
        operations = " ".join(node.op for node in program.nodes)
        name = f"{name}_in_scopes_{hashlib.sha256(operations.encode()).hexdigest()[:16]}"
    gradient.__name__ = gradient.__qualname__ = name
    return gradient
