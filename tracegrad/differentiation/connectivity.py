"""Which inputs of a program get a gradient from its outputs.

An input is *connected* to an output if there is a path of data flow between them on which the VJP
of every node depends on its cotangent, or is a rule that returned a gradient. That is decided on
the program, never on values: a gradient that happens to be zero is connected. Whether a VJP depends
on its cotangent JAX is asked, node by node: the VJP is traced, imported, and looked through.
``round``, ``floor`` and ``sign`` cut because JAX's derivative of them is zero by structure.

A custom gradient cuts where its rule returns None. What it does return is a gradient, though it be
zeros, or the same whatever the cotangent is: an auxiliary loss is added to a model by such a rule.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad._jax.caches import cached, once_for_each
from tracegrad.ir import (
    Apply,
    CustomGradient,
    Graph,
    Literal,
    Node,
    StopGradient,
    Value,
    has_gradient,
    is_reference,
)
from tracegrad.ir.closed_over import loses_derivative
from tracegrad.ir.dependence import (
    Masks,
    dependence,
    enter,
    joined,
    node_dependence,
    of_each,
    spread,
)
from tracegrad.ir.importer import import_program
from tracegrad.ir.operations import CONNECTING
from tracegrad.ir.running import run_node

# The VJPs of operations without regions that are remembered: all of a big model has some hundreds.
# Without them a gradient that may not be unconnected takes half as long again to trace.
_REMEMBERED = 4096


class UnconnectedError(ValueError):
    """A gradient was asked for that does not exist.

    The message names each leaf that gets none, and what cuts it off at which of the user's lines.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> try:
    ...     tg.grad(jnp.round, unconnected="raise")(1.5)
    ... except tg.UnconnectedError as error:
    ...     print(str(error).splitlines()[1])
      a: cut by round, whose derivative is zero
    """


def connections(graph: Graph) -> list[frozenset[int]]:
    """For every output of a graph, the inputs (by position) that are connected to it."""
    inputs = graph.inputs
    sources = of_each(map(is_connectable, inputs))
    return [
        frozenset(i for i in range(len(inputs)) if mask >> i & 1)
        for mask in spread(graph, sources, Walk().rule)
    ]


def is_connectable(value: Value | Literal) -> bool:
    """Whether a gradient can arrive at a value (or at what is written to a Ref)."""
    return is_reference(value) or has_gradient(value)


# ------------------------------------------------------------------------------- the forward walk


class Walk:
    """One walk over a graph: shared regions and custom rules are looked at once, and so is what a
    node connects, which `reached_from` asks first and `node_vjp` after it."""

    def rule(self, node: Node, ins: Masks) -> Masks:
        """Masks of the inputs connected to each result, given those connected to each operand.

        What is not connectable has none, of the results if it is so of the operands."""
        if isinstance(node, StopGradient) or not any(ins):
            return [0] * len(node.outputs)
        if any(is_reference(v) for v in (*node.inputs, *node.outputs)):
            # What is written to a Ref may be read anywhere; JAX differentiates it as a whole.
            return [joined(ins) if is_connectable(v) else 0 for v in node.outputs]
        if node.op in CONNECTING:
            return _all_to_all(node, ins)
        if node.regions and (entered := self.enter(node, ins)) is not None:
            return entered[0]
        return _carried(self.vjp_rows(node, tuple(mask != 0 for mask in ins)), ins)

    def enter(self, node: Node, ins: Masks) -> tuple[Masks, dict[str, Masks]] | None:
        """As `dependence.enter`; None for a node that is differentiated as a whole, too."""
        # The operations inside a shard_map can be differentiated only inside their mesh.
        if isinstance(node, CustomGradient) or node.op == "shard_map":
            return None
        return enter(node, ins, self.region)

    @once_for_each
    def region(self, graph: Graph, ins: Masks) -> Masks:
        return spread(graph, ins, self.rule)

    @once_for_each
    def links(self, node: Node, active: Sequence[int]) -> Masks:
        """For every result of a node, which of its active operands are connected to it."""
        return self.rule(node, of_each(i in active for i in range(len(node.inputs))))

    def vjp_rows(self, node: Node, reached: tuple[bool, ...]) -> tuple[int, ...]:
        """For every result of a node, the operands whose cotangents depend on its cotangent."""
        if node.op in CONNECTING:
            return tuple(_all_to_all(node, of_each(reached)))
        if isinstance(node, Apply):
            params = tuple(sorted(node.params.items()))
            try:
                rows = _remembered_rows(node.primitive, params, *_types(node), reached)
            except TypeError:  # a parameter that cannot be hashed
                rows = _rows(_binding(node), *_types(node), reached)
        else:
            rows = self._region_rows(node, reached)
        if rows is not None:
            return rows
        if isinstance(node, CustomGradient):  # its rule may use what its primal does not
            return tuple(_all_to_all(node, of_each(reached)))
        pairs = zip(node_dependence(node), node.outputs, strict=True)
        return tuple(row if is_connectable(v) else 0 for row, v in pairs)

    @once_for_each
    def _region_rows(self, node: Node, reached: tuple[bool, ...]) -> Rows:
        if isinstance(node, CustomGradient):
            return _rule_rows(node, reached)
        return _call_rows(node, reached)


def _all_to_all(node: Node, ins: Masks) -> Masks:
    """Masks of results of which each that has a cotangent is connected to every such operand."""
    masks = [mask for mask, v in zip(ins, node.inputs, strict=True) if has_gradient(v)]
    everything = functools.reduce(operator.or_, masks, 0)
    return [everything if has_gradient(v) else 0 for v in node.outputs]


def _carried(rows: Sequence[int], ins: Masks) -> Masks:
    """The masks of results, of each of which a row tells the operands that it is connected to."""
    return [
        functools.reduce(operator.or_, (m for i, m in enumerate(ins) if row >> i & 1), 0)
        for row in rows
    ]


# -------------------------------------------------------------------------------- one node's VJP

Params = tuple[tuple[str, Any], ...]
Rows = tuple[int, ...] | None


Types = tuple[Any, ...]


def _types(node: Node) -> tuple[Types, Types]:
    """Of the operands, and of the cotangents of the results: None for one that has none."""
    cotangents = tuple([v.aval if is_connectable(v) else None for v in node.outputs])
    return tuple([v.aval for v in node.inputs]), cotangents


def _rule_rows(node: CustomGradient, reached: tuple[bool, ...]) -> Rows:
    """For every result of a custom gradient the operands for which its rule returned a gradient.

    None where JAX cannot differentiate it.
    """
    if node.kind == "vjp":
        return _returned_rows(node, reached)
    if loses_derivative(node, reached):
        return None  # connected: differentiating it is an error
    rows = _call_rows(node, reached)
    if rows is None or all(row for row, v in zip(rows, node.outputs) if has_gradient(v)):
        return rows
    # A rule of tangents gives one to each result: to an operand of which that is independent it
    # gives nothing, unless it is what the rule has written for all of them.
    first = node.closed_over
    given = [i >= first and has_gradient(v) for i, v in enumerate(node.inputs)]
    try:
        written = _jax.written_tangents(
            _binding(node), _types(node)[0], [i for i, flows in enumerate(given) if flows]
        )
    except Exception:
        return rows
    of_all = _call_rows(node, tuple(given)) or rows
    everything = _all_to_all(node, of_each([a and b for a, b in zip(reached, given, strict=True)]))
    return tuple(
        everything[j] if j in written and not of_all[j] else row for j, row in enumerate(rows)
    )


def _call_rows(node: Node, reached: tuple[bool, ...]) -> Rows:
    """As `_rows`, of a node with regions."""
    rows = _rows(_binding(node), *_types(node), reached)
    if rows is None or isinstance(node, CustomGradient) or not _has_rules(node):
        return rows
    returned = _returned_rows(node, reached)
    return rows if returned is None else tuple(map(operator.or_, rows, returned))


def _has_rules(node: Node) -> bool:
    return any(
        isinstance(inner, CustomGradient)
        for region in node.regions.values()
        for each in region.regions_below
        for inner in each.nodes
    )


def _returned_rows(node: Node, reached: tuple[bool, ...]) -> Rows:
    """For every result the operands that JAX gives a cotangent that is no symbolic zero."""
    active = [i for i, is_reached in enumerate(reached) if is_reached]
    flowing = [j for j, v in enumerate(node.outputs) if has_gradient(v)]
    # Only a rule that is told of symbolic zeros can tell the cotangents of its results apart.
    alike = isinstance(node, CustomGradient) and not node.params.get("symbolic_zeros")
    rows = [0] * len(node.outputs)
    try:
        for group in [flowing] if alike else [[j] for j in flowing]:
            found = _jax.returned_gradients(_binding(node), _types(node)[0], active, group)
            for j in group:
                rows[j] = joined(1 << i for i in found)
    except Exception:
        return None
    return tuple(rows)


def _binding(node: Node) -> Callable[[Sequence[Any]], list[Any]]:
    """A node as it is now: its parameters hold regions and rules as they were before any edit."""
    return lambda operands: run_node(node, operands)


@cached(_REMEMBERED)
def _remembered_rows(
    primitive: Any,
    params: Params,
    avals: Types,
    cotangents: Types,
    reached: tuple[bool, ...],
) -> Rows:
    return _rows(
        lambda operands: _jax.bind(primitive, operands, dict(params)), avals, cotangents, reached
    )


def _rows(
    run: Callable[[Sequence[Any]], list[Any]],
    avals: Types,
    cotangents: Types,
    reached: tuple[bool, ...],
) -> Rows:
    """For every result the operands whose cotangents depend on it, among those that are reached.

    None where JAX cannot differentiate the node in reverse: then it counts as connected, and the
    gradient itself raises JAX's own error.
    """
    active = [i for i, is_reached in enumerate(reached) if is_reached]
    flowing = [j for j, aval in enumerate(cotangents) if aval is not None]

    def pullback(args: list[Any], given: list[Any]) -> list[Any]:
        _, vjp = _jax.vjp_of_some(run, args, active, flowing)
        return list(vjp(given))

    try:
        program = jax.make_jaxpr(pullback)(list(avals), [cotangents[j] for j in flowing])
    except Exception:
        return None
    results = dependence(import_program(program))
    rows = [0] * len(cotangents)
    for place, j in enumerate(flowing, len(avals)):
        rows[j] = joined(1 << i for i, m in zip(active, results, strict=True) if m >> place & 1)
    return tuple(rows)
