"""Finds the values that the backward pass of a node reads, by asking JAX.

JAX traces the node's own VJP. A search follows the residuals of the VJP back to the node's operands
and results, through cheap operations, which the backward pass can repeat. The result of a costly
operation inside the rule (the stacked results of a scan, the factors of a decomposition) needs
memory of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Node, Occurrence, operations
from tracegrad.ir.running import run_node
from tracegrad.planning.costs import nbytes


@dataclass(frozen=True, slots=True)
class Residuals:
    """The values that the backward pass of a node reads.

    Attributes:
      operands, results: the positions of the operands and results that it reads.
      extra: bytes of the other values that it reads.
      compares: whether it compares a result with an operand, as the derivative of a maximum does.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    extra: int
    compares: bool


class NodeResiduals:
    """The residuals of nodes; asks JAX once for all nodes with equal types and parameters."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Residuals] = {}
        self._keep_alive: list[Any] = []  # parameters in keys by their identity

    def of(self, node: Node, active: Sequence[int], outputs: Sequence[int]) -> Residuals:
        """Returns the residuals of a node. `active` and `outputs`: the positions of the operands
        and of the results that get a cotangent. Raises ValueError, with the node and its line, for
        a node without a reverse-mode derivative."""
        key = (self._node_key(node), tuple(active), tuple(outputs))
        if key not in self._known:
            try:
                self._known[key] = _ask_jax(node, active, outputs)
            except Exception as error:
                raise ValueError(
                    "cannot plan what to recompute for a program without a gradient: "
                    f"{Occurrence((), node)} has no reverse-mode derivative ({error}). If no "
                    "gradient is needed through it, apply jax.lax.stop_gradient to its operands; "
                    "or give the budget to a train step, which computes only the gradients that "
                    "it needs"
                ) from error
        return self._known[key]

    def _node_key(self, node: Node) -> Hashable:
        types = tuple(str(v.aval) for v in node.inputs)
        params = []
        for name, value in node.params.items():
            try:
                hash(value)
            except TypeError:
                value = id(value)
                self._keep_alive.append(node.params)
            params.append((name, value))
        regions = tuple(node.regions.items())
        return (node.primitive, types, tuple(params), regions)


def _ask_jax(node: Node, active: Sequence[int], outputs: Sequence[int]) -> Residuals:
    run, types = functools.partial(run_node, node), [v.aval for v in node.inputs]
    residuals = residuals_of(run, types, active)
    if node.regions:  # some loops raise only when the VJP is called
        cotangents = [node.outputs[i].aval for i in outputs]
        jax.eval_shape(
            lambda args, cts: _jax.vjp_of_some(run, args, active, outputs)[1](cts),
            types,
            cotangents,
        )
    return residuals


def residuals_of(
    run: Callable[[Sequence[Any]], Sequence[Any]], types: Sequence[Any], active: Sequence[int]
) -> Residuals:
    """Returns the values that the backward pass of a program reads. `types` are the types of the
    operands of `run`; `active` has the positions of the operands that get a cotangent."""

    def forward(*args: Any) -> Any:
        results, vjp = _jax.vjp_of_some(run, args, active)
        return results, jax.tree.leaves(vjp)

    program, shapes = jax.make_jaxpr(forward, return_shape=True)(*types)
    program, count = _jax.opened(program), len(shapes[0])
    operand = {var: i for i, var in enumerate(program.invars)}
    producer = {var: equation for equation in program.eqns for var in equation.outvars}
    result: dict[Any, int] = {}
    for i, var in enumerate(program.outvars[:count]):
        while not hasattr(var, "val"):
            result.setdefault(var, i)
            if var not in producer or producer[var].primitive.name not in operations.RESHAPES:
                break
            (var,) = producer[var].invars  # a reshaped result is the same buffer
    reads: set[Any] = set()
    extra, compares = 0, False
    pending = [v for v in program.outvars[count:] if not hasattr(v, "val")]
    while pending:
        var = pending.pop()
        if var in reads:
            continue
        reads.add(var)
        if var in producer and var not in result:
            equation = producer[var]
            if _contains_operation(equation, operations.KERNELS):
                extra += nbytes(var.aval)
                continue
            pending += [v for v in equation.invars if not hasattr(v, "val")]
            if _contains_operation(equation, operations.COMPARISONS):
                origins = _find_origins(equation, producer, result)
                compares |= not (origins.isdisjoint(result) or origins.isdisjoint(operand))
    return Residuals(
        operands=tuple(sorted({operand[v] for v in reads if v in operand})),
        results=tuple(sorted({result[v] for v in reads if v in result and v not in operand})),
        extra=extra,
        compares=compares,
    )


def _contains_operation(equation: Any, names: Collection[str]) -> bool:
    """Whether an equation is one of these operations, or contains one, at any depth of calls."""
    programs = (v for v in equation.params.values() if isinstance(v, _jax.PROGRAM_TYPES))
    return equation.primitive.name in names or any(
        _contains_operation(inner, names)
        for program in programs
        for inner in _jax.opened(program).eqns
    )


def _find_origins(equation: Any, producer: Mapping[Any, Any], result: Collection[Any]) -> set[Any]:
    """Returns the results, operands and constants from which an equation's inputs are computed."""
    origins, seen, pending = set[Any](), set[Any](), [*equation.invars]
    while pending:
        var = pending.pop()
        if hasattr(var, "val") or var in seen:
            continue
        seen.add(var)
        if var in result or var not in producer:
            origins.add(var)
        else:
            pending += producer[var].invars
    return origins
