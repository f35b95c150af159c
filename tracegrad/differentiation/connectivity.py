"""Finds the inputs of a program that get a gradient from its outputs.

An input is *connected* to an output if data flow from the input to the output along a path whose
nodes all pass a gradient back: the VJP of the node depends on its cotangent, or is a custom rule
that returned a gradient. The program decides, never the values: an input whose gradient happens to
be zero is connected. JAX traces the VJP of each node, and the analysis of the traced VJP says
whether it depends on its cotangent. ``round``, ``floor`` and ``sign`` cut because their derivative
in JAX is zero by structure.

A custom gradient cuts if its rule returns None. Any other result of the rule is a gradient, even
zeros, or an array that does not depend on the cotangent: such a rule adds an auxiliary loss.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Sequence
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
from tracegrad.ir.importer import graph_of
from tracegrad.ir.operations import CONNECTING
from tracegrad.ir.running import run_node

# The number of cached VJPs of operations without regions; a big model has some hundreds. Without
# the cache, a gradient with unconnected="raise" takes 1.5 times as long to trace.
_MAX_CACHED_VJPS = 4096


class UnconnectedError(ValueError):
    """No gradient reaches a selected leaf.

    The message names each leaf without a gradient, and the operation and line that cut it off.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> try:
    ...     tg.grad(jnp.round, unconnected="raise")(1.5)
    ... except tg.UnconnectedError as error:
    ...     print(str(error).splitlines()[1])
      a: cut by round, whose derivative is zero
    """


def connections(
    graph: Graph, differentiated: Collection[int] | None = None
) -> list[frozenset[int]]:
    """Returns, for every output of a graph, the positions of the inputs connected to the output.

    `differentiated`: the inputs that are differentiated, by default all: a custom rule may ask.
    """
    inputs = graph.inputs
    sources = of_each(are_sources(graph, differentiated))
    return [
        frozenset(i for i in range(len(inputs)) if mask >> i & 1)
        for mask in spread(graph, sources, Walk().rule)
    ]


def are_sources(graph: Graph, differentiated: Collection[int] | None) -> list[bool]:
    """Returns for each input of a graph whether it is differentiated; None stands for all."""
    return [
        is_connectable(value) and (differentiated is None or i in differentiated)
        for i, value in enumerate(graph.inputs)
    ]


def is_connectable(value: Value | Literal) -> bool:
    """Whether a gradient can arrive at a value, or at the values that are written to a Ref."""
    return is_reference(value) or has_gradient(value)


# ------------------------------------------------------------------------------- the forward walk


class Walk:
    """Finds connections in a graph, and caches them for shared regions, for custom rules, and for
    nodes: first `reached_from` and then `node_vjp` ask for the links of a node."""

    def rule(self, node: Node, ins: Masks) -> Masks:
        """Returns, for each result, a mask of the graph's inputs that are connected to it. `ins`
        has such a mask for each operand. A value that is not connectable has an empty mask."""
        if isinstance(node, StopGradient) or not any(ins):
            return [0] * len(node.outputs)
        if any(is_reference(v) for v in (*node.inputs, *node.outputs)):
            # A value that is written to a Ref may be read anywhere; JAX differentiates the Ref as a
            # whole.
            return [joined(ins) if is_connectable(v) else 0 for v in node.outputs]
        if node.op in CONNECTING:
            return _connect_all(node, ins)
        if node.regions and (entered := self.enter(node, ins)) is not None:
            return entered[0]
        return _union_of_rows(self.vjp_rows(node, tuple(mask != 0 for mask in ins)), ins)

    def enter(self, node: Node, ins: Masks) -> tuple[Masks, dict[str, Masks]] | None:
        """Like `dependence.enter`, but returns None also for a node that is differentiated as a
        whole."""
        # The operations inside a shard_map can be differentiated only inside their mesh.
        if isinstance(node, CustomGradient) or node.op == "shard_map":
            return None
        return enter(node, ins, self.region)

    @once_for_each
    def region(self, graph: Graph, ins: Masks) -> Masks:
        """Like `rule`, for a graph: returns a mask for each output."""
        return spread(graph, ins, self.rule)

    @once_for_each
    def links(self, node: Node, active: Sequence[int]) -> Masks:
        """Returns, for every result, a mask of the active operands that are connected to it."""
        return self.rule(node, of_each(i in active for i in range(len(node.inputs))))

    def vjp_rows(self, node: Node, reached: tuple[bool, ...]) -> tuple[int, ...]:
        """Returns, for every result, a mask of the reached operands whose cotangents depend on the
        result's cotangent."""
        if node.op in CONNECTING:
            return tuple(_connect_all(node, of_each(reached)))
        if isinstance(node, Apply):
            params = tuple(sorted(node.params.items()))
            try:
                rows = _cached_rows(
                    node.primitive, params, *_operand_and_cotangent_types(node), reached
                )
            except TypeError:  # a parameter that cannot be hashed
                rows = _vjp_rows(_make_run(node), *_operand_and_cotangent_types(node), reached)
        else:
            rows = _region_rows(node, reached)
        if rows is not None:
            return rows
        if isinstance(node, CustomGradient):  # the rule may use more operands than the function
            return tuple(_connect_all(node, of_each(reached)))
        pairs = zip(node_dependence(node), node.outputs, strict=True)
        return tuple(row if is_connectable(v) else 0 for row, v in pairs)


@once_for_each  # the node keeps the results: tracing the backward of a solver takes seconds
def _region_rows(node: Node, reached: tuple[bool, ...]) -> Rows:
    if isinstance(node, CustomGradient):
        return _rows_of_rule(node, reached)
    return _rows_of_call(node, reached)


def _connect_all(node: Node, ins: Masks) -> Masks:
    masks = [mask for mask, v in zip(ins, node.inputs, strict=True) if has_gradient(v)]
    everything = functools.reduce(operator.or_, masks, 0)
    return [everything if has_gradient(v) else 0 for v in node.outputs]


def _union_of_rows(rows: Sequence[int], ins: Masks) -> Masks:
    return [
        functools.reduce(operator.or_, (m for i, m in enumerate(ins) if row >> i & 1), 0)
        for row in rows
    ]


# -------------------------------------------------------------------------------- one node's VJP

Params = tuple[tuple[str, Any], ...]
Types = tuple[Any, ...]
# For each result, a mask of operands; None if JAX cannot differentiate the node.
Rows = tuple[int, ...] | None


def _operand_and_cotangent_types(node: Node) -> tuple[Types, Types]:
    """Returns the types of the operands and of the results' cotangents; None for no cotangent."""
    cotangents = tuple([v.aval if is_connectable(v) else None for v in node.outputs])
    return tuple([v.aval for v in node.inputs]), cotangents


def _rows_of_rule(node: CustomGradient, reached: tuple[bool, ...]) -> Rows:
    """Like `_vjp_rows`, for a custom gradient."""
    if node.kind == "vjp":
        return _rows_of_returned_gradients(node, reached)
    if loses_derivative(node, reached):
        return None  # connected: differentiating it is an error
    rows = _rows_of_call(node, reached)
    if rows is None or all(row for row, v in zip(rows, node.outputs) if has_gradient(v)):
        return rows
    # A JVP rule returns a tangent for each result. An operand is unconnected if the tangent is
    # independent of it. But if the tangent is independent of all operands, and the rule has written
    # the tangent (not a symbolic zero), all operands are connected.
    first = node.closed_over
    active = [i >= first and has_gradient(v) for i, v in enumerate(node.inputs)]
    try:
        written = _jax.written_tangents(
            _make_run(node),
            _operand_and_cotangent_types(node)[0],
            [i for i, is_active in enumerate(active) if is_active],
        )
    except Exception:
        return rows
    rows_of_active = _rows_of_call(node, tuple(active)) or rows
    both = [a and b for a, b in zip(reached, active, strict=True)]
    all_connected = _connect_all(node, of_each(both))
    return tuple(
        all_connected[j] if j in written and not rows_of_active[j] else row
        for j, row in enumerate(rows)
    )


def _rows_of_call(node: Node, reached: tuple[bool, ...]) -> Rows:
    rows = _vjp_rows(_make_run(node), *_operand_and_cotangent_types(node), reached)
    if rows is None or isinstance(node, CustomGradient) or not _has_rules(node):
        return rows
    returned = _rows_of_returned_gradients(node, reached)
    return rows if returned is None else tuple(map(operator.or_, rows, returned))


def _has_rules(node: Node) -> bool:
    return any(
        isinstance(inner, CustomGradient)
        for region in node.regions.values()
        for each in region.regions_below
        for inner in each.nodes
    )


def _rows_of_returned_gradients(node: Node, reached: tuple[bool, ...]) -> Rows:
    """Returns, for every result, the reached operands whose cotangents are no symbolic zeros."""
    active = [i for i, is_reached in enumerate(reached) if is_reached]
    flowing = [j for j, v in enumerate(node.outputs) if has_gradient(v)]
    # Without symbolic zeros, a rule cannot tell which results have a cotangent: ask for all results
    # at once.
    at_once = isinstance(node, CustomGradient) and not node.params.get("symbolic_zeros")
    rows = [0] * len(node.outputs)
    try:
        for group in [flowing] if at_once else [[j] for j in flowing]:
            operands = _jax.returned_gradients(
                _make_run(node), _operand_and_cotangent_types(node)[0], active, group
            )
            for j in group:
                rows[j] = joined(1 << i for i in operands)
    except Exception:
        return None
    return tuple(rows)


def _make_run(node: Node) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns a function that runs the node with its edits, which its parameters do not have."""
    return lambda operands: run_node(node, operands)


@cached(_MAX_CACHED_VJPS)
def _cached_rows(
    primitive: Any,
    params: Params,
    avals: Types,
    cotangents: Types,
    reached: tuple[bool, ...],
) -> Rows:
    return _vjp_rows(
        lambda operands: _jax.bind(primitive, operands, dict(params)), avals, cotangents, reached
    )


def _vjp_rows(
    run: Callable[[Sequence[Any]], list[Any]],
    avals: Types,
    cotangents: Types,
    reached: tuple[bool, ...],
) -> Rows:
    """Returns, for every result, the reached operands whose cotangents depend on the result's
    cotangent. None if JAX cannot differentiate the node in reverse mode: then the node counts as
    connected, and computing the gradient raises JAX's own error."""
    active = [i for i, is_reached in enumerate(reached) if is_reached]
    flowing = [j for j, aval in enumerate(cotangents) if aval is not None]

    def pullback(args: list[Any], cts: list[Any]) -> list[Any]:
        _, vjp = _jax.vjp_of_some(run, args, active, flowing)
        return list(vjp(cts))

    try:
        program = jax.make_jaxpr(pullback)(list(avals), [cotangents[j] for j in flowing])
    except Exception:
        return None
    results = dependence(graph_of(program))
    rows = [0] * len(cotangents)
    for place, j in enumerate(flowing, len(avals)):
        rows[j] = joined(1 << i for i, m in zip(active, results, strict=True) if m >> place & 1)
    return tuple(rows)
