"""Rewrites a scan into groups of iterations: each group is one iteration of an outer scan.

If the backward pass recomputes a whole group, only the first carry of the group is kept. This is
Griewank's checkpointing at two levels, and the square root of the length is the best group size.
With a body of its own for each iteration of a group, some iterations may keep values that other
iterations recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tracegrad import _jax
from tracegrad.ir import Graph, Node
from tracegrad.tracing import to_callable
from tracegrad.tracing.graphs import graph

_Step = Callable[[Sequence[Any], list[Any], list[Any]], tuple[list[Any], list[Any]]]


def group_size(length: int) -> int:
    """Returns the divisor of a length that is nearest to its square root; 1 for a prime."""
    divisors = [d for d in range(2, length) if length % d == 0]
    return min(divisors, key=lambda d: (d + length // d, d), default=1)


def in_groups(node: Node, body: Graph, size: int) -> Callable[..., list[Any]]:
    """Returns the scan with this body, in groups of `size` iterations; a size of 1 makes no groups.
    The backward pass recomputes each group from its first carry."""
    one = _body_as_step(node, body)
    if size == 1:
        return _scan_over_groups(node, one, size)

    def group(
        fixed: Sequence[Any], carry: list[Any], slices: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            return one(fixed, carry, slices)

        how = {"reverse": node.params["reverse"], "unroll": node.params["unroll"]}
        return lax.scan(step, carry, slices, length=size, **how)

    return _scan_over_groups(node, jax.checkpoint(group), size)


def in_turn(node: Node, bodies: Sequence[Graph]) -> Callable[..., list[Any]]:
    """Returns the scan with these bodies (made by `part_of`) as its iterations, in turn, over and
    over. The scan's length is a multiple of the number of bodies."""
    steps = [_body_as_step(node, body) for body in bodies]

    def group(
        fixed: Sequence[Any], carry: list[Any], slices: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        order = range(len(steps))
        rows = {}
        for i in reversed(order) if node.params["reverse"] else order:
            carry, rows[i] = steps[i](fixed, carry, slices)
        return carry, [jnp.stack(each) for each in zip(*(rows[i] for i in order), strict=True)]

    return _scan_over_groups(node, group, len(steps))


def part_of(node: Node, body: Graph, place: int, count: int) -> Graph:
    """Returns a body of a scan for iteration `place` of a group of `count` iterations.

    The body takes the slices of the whole group, and selects its own slice inside. So if the body
    is recomputed, only the slices of the group are kept.
    """
    first, run = sum(_jax.scan_split(node.params)), to_callable(body)

    def part(*operands: Any) -> list[Any]:
        results: list[Any] = run(*operands[:first], *(x[place] for x in operands[first:]))
        return results

    types = [*body.in_avals[:first]]
    types += [_jax.struct((count, *t.shape), t.dtype) for t in body.in_avals[first:]]
    return graph(part, *types)


def _body_as_step(node: Node, body: Graph) -> _Step:
    run, (_, carried) = to_callable(body), _jax.scan_split(node.params)

    def step(
        fixed: Sequence[Any], carry: list[Any], slices: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        results = run(*fixed, *carry, *slices)
        return results[:carried], results[carried:]

    return step


def _scan_over_groups(node: Node, group: _Step, size: int) -> Callable[..., list[Any]]:
    """Runs `group` for each `size` iterations of the node's scan."""
    constants, carried = _jax.scan_split(node.params)
    groups = node.params["length"] // size

    def run(*operands: Any) -> list[Any]:
        fixed = operands[:constants]
        carry = list(operands[constants : constants + carried])
        scanned = list(operands[constants + carried :])
        if size > 1:
            scanned = [x.reshape(groups, size, *x.shape[1:]) for x in scanned]
        final, stacked = lax.scan(
            lambda carry, slices: group(fixed, carry, slices),
            carry,
            scanned,
            length=groups,
            reverse=node.params["reverse"],
            unroll=node.params["unroll"] if size == 1 else 1,
        )
        if size > 1:
            stacked = [y.reshape(groups * size, *y.shape[2:]) for y in stacked]
        return [*final, *stacked]

    run.__name__ = run.__qualname__ = "scan"
    return run
