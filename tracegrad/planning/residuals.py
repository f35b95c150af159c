"""What the backward pass of a node reads, asked of JAX.

JAX traces the node's own VJP; its residuals are traced back, through operations that the backward
pass can do again for next to nothing, to the node's operands and results. What comes of a costly
operation inside the rule (the stacks of a scan, the factors of a decomposition) is memory of its
own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Node, Occurrence, has_gradient, operations
from tracegrad.ir.running import run_node
from tracegrad.planning.costs import nbytes


@dataclass(frozen=True, slots=True)
class Residuals:
    """What the backward pass of a node reads.

    Attributes:
      operands, results: the positions of those that it reads.
      extra: bytes of what it reads beside them; at least one, if that is all on the host.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    extra: int


class NodeResiduals:
    """Answers for nodes; asks JAX once for those that differ in their operands' values alone."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Residuals] = {}
        self._keep_alive: list[Any] = []  # what is known by its identity

    def of(self, node: Node, active: Sequence[int]) -> Residuals:
        """`active`: the positions of the operands that get a cotangent.

        Raises ValueError, naming the node and its line, if it has no reverse-mode derivative.
        """
        key = (self._key(node), tuple(active))
        if key not in self._known:
            try:
                self._known[key] = _ask(node, active)
            except Exception as error:
                raise ValueError(
                    "cannot plan what to recompute for a program without a gradient: "
                    f"{Occurrence((), node)} has no reverse-mode derivative ({error}). If none is "
                    "needed through it, give it jax.lax.stop_gradient of what it takes; or give "
                    "the budget to a train step, which takes the gradient by what it needs alone"
                ) from error
        return self._known[key]

    def _key(self, node: Node) -> Hashable:
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


def _ask(node: Node, active: Sequence[int]) -> Residuals:
    run, types = functools.partial(run_node, node), [v.aval for v in node.inputs]
    found = residuals_of(run, types, active)
    if node.regions:  # a loop shows only now that it cannot be run backwards
        flowing = [i for i, v in enumerate(node.outputs) if has_gradient(v)]
        cotangents = [node.outputs[i].aval for i in flowing]
        jax.eval_shape(
            lambda args, given: _jax.vjp_of_some(run, args, active, flowing)[1](given),
            types,
            cotangents,
        )
    return found


def residuals_of(
    run: Callable[[Sequence[Any]], Sequence[Any]], types: Sequence[Any], active: Sequence[int]
) -> Residuals:
    """What the backward pass of a program reads; `run`: of operands of these types, of which those
    at the positions `active` get a cotangent."""

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
            (var,) = producer[var].invars  # written as it is
    reads: set[Any] = set()
    extra = 0
    pending = [v for v in program.outvars[count:] if not hasattr(v, "val")]
    while pending:
        var = pending.pop()
        if var in reads:
            continue
        reads.add(var)
        if var in producer and var not in result:
            equation = producer[var]
            if _jax.is_on_host(var.aval):
                # Takes nothing of the device, but has to be made, which bytes stand for.
                extra = max(extra, 1)
                continue
            if equation.primitive.name in operations.KERNELS or _has_costly(equation):
                extra += nbytes(var.aval)
            else:
                pending += [v for v in equation.invars if not hasattr(v, "val")]
    return Residuals(
        operands=tuple(sorted({operand[v] for v in reads if v in operand})),
        results=tuple(sorted({result[v] for v in reads if v in result and v not in operand})),
        extra=extra,
    )


def _has_costly(equation: Any) -> bool:
    """Whether a call inside a rule does something costly."""
    for value in equation.params.values():
        if isinstance(value, _jax.PROGRAM_TYPES):
            inner = _jax.opened(value).eqns
            if any(e.primitive.name in operations.KERNELS or _has_costly(e) for e in inner):
                return True
    return False
