"""One gradient program for every choice of results that have a cotangent, told by a flag for each.

Where a result of a function has no cotangent, JAX leaves out of its backward pass what leads to
that result alone. A program that was written down cannot: zeros are given for the cotangent, and a
rule such as ``lambda dy: dy + 1`` makes ones of them, an infinite derivative makes NaN. So it is
found for each value of the function *when* a gradient comes to it: if one of some results has its
flag. Where a value is read by an operation through which a gradient comes more seldom than to the
value itself, a gate is put between them, which lets cotangents pass only then. What lies behind a
closed gate may compute what it will.

A gradient program has gates already, of its own flags; what leads to a gate alone has a gradient
only if it is open. So a gate has its condition as a name, by which the next derivative knows it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tracegrad import _jax
from tracegrad.differentiation.gates import (
    ALWAYS,
    NEVER,
    Edge,
    Inner,
    Planner,
    When,
    any_of,
    entry,
    name_of,
    names_condition,
)
from tracegrad.ir import Graph, Node
from tracegrad.ir.running import read, run_graph, run_node, run_nodes

_named: Callable[[Any, str], Any] = checkpoint_name


def with_flags(graph: Graph, active: Sequence[int], flowing: Sequence[int]) -> Gated | None:
    """The function that a graph computes, of flags as well, one for each of several results.

    Args:
      graph: of the function.
      active: the inputs with respect to which it is differentiated.
      flowing: the outputs that may have cotangents.

    Returns:
      What calls it, differentiable as the graph is; the cotangent of an output whose flag is False
      must be zeros. None if no flag is needed: whatever is made of such zeros is zeros.
    """
    nodes = [node for region in graph.regions_below for node in region.nodes]
    if len(flowing) == 1 and not any(map(names_condition, nodes)):
        return None
    if any(node.has_references for node in nodes):
        return None
    first = len(graph.inputs) + len(flowing)
    flags = {j: frozenset({frozenset({k})}) for k, j in enumerate(flowing, first)}
    if len(flowing) == 1:
        flags = dict.fromkeys(flowing, ALWAYS)
    reached = [int(i in active) for i in range(len(graph.inputs))]
    outs = [Edge(flags.get(j, NEVER), True) for j in range(len(graph.outputs))]
    plan = Planner().plan(graph, reached, outs, [None] * len(reached))
    whole = Edge(any_of(list(flags.values())), False)
    inner = Inner(plan, [entry(edge, whole) for edge in plan.inputs])
    return Gated(graph, inner, first) if inner.is_gated else None


@dataclass(frozen=True)
class Gated:
    """A graph with its gates; `first`: the place of the first flag."""

    graph: Graph
    inner: Inner
    first: int

    def __call__(self, args: Sequence[Any], flags: Sequence[Any]) -> list[Any]:
        """Runs it on flat arguments and ``bool[]`` flags; returns its flat outputs."""
        together = jnp.stack(flags) if flags else None
        known: dict[When, Any] = {}

        def truth(when: When) -> Any:
            # Outside of all regions: so they get it as an operand, and the name stays with it.
            if when not in known:
                known[when] = _named(self._truth(when, args, together), name_of(when))
            return known[when]

        for when in _conditions(self.inner):
            truth(when)
        return _run(self.graph, self.inner, args, truth)

    def _truth(self, when: When, args: Sequence[Any], flags: Any) -> Any:
        # By the earlier flags beside them, so that each of several hundred takes no operation.
        groups: dict[frozenset[int], list[int]] = {}
        for each in when:
            own = [place - self.first for place in each if place >= self.first]
            groups.setdefault(each - {place + self.first for place in own}, []).extend(own)
        found = []
        for earlier, own in groups.items():
            parts = [args[place] for place in sorted(earlier)]
            parts += [jnp.any(flags[np.array(sorted(own))])] if own else []
            found.append(functools.reduce(jnp.logical_and, parts))
        return functools.reduce(jnp.logical_or, found)


Truth = Callable[[When], Any]


def _conditions(inner: Inner) -> set[When]:
    """Of all gates, at all depths."""
    plan = inner.plan
    gates = [*inner.entries, *plan.outputs, *itertools.chain(*plan.operands.values())]
    gates += [gate for groups in plan.apart.values() for _, each in groups for gate in each]
    below = [each for regions in plan.inner.values() for each in regions.values()]
    return set(filter(None, gates)).union(*map(_conditions, below))


def _run(graph: Graph, inner: Inner, args: Sequence[Any], truth: Truth) -> list[Any]:
    if not inner.is_gated:
        return run_graph(graph, args)
    plan, lowering = inner.plan, Lowering()

    def gated(node: Node, operands: list[Any]) -> list[Any]:
        operands = _through_gates(operands, plan.operands.get(node), truth)
        if node in plan.inner:
            return _run_inside(node, plan.inner[node], operands, truth)
        if node not in plan.apart:
            return run_node(node, operands, lowering)
        results: list[Any] = [None] * len(node.outputs)
        for places, gates in plan.apart[node]:
            found = run_node(node, _through_gates(operands, gates, truth), lowering)
            for place in places:
                results[place] = found[place]
        return results

    instead = {n: functools.partial(gated, n) for n in (*plan.operands, *plan.apart, *plan.inner)}
    args = _through_gates(args, inner.entries, truth)
    values = run_nodes(graph, args, lowering, instead=instead)
    return _through_gates(read(graph.outputs, values), plan.outputs, truth)


def _run_inside(node: Any, inner: dict[str, Inner], operands: list[Any], truth: Truth) -> list[Any]:
    """A node with gates in its regions, which close over their conditions."""
    by_region = {id(node.regions[name]): each for name, each in inner.items()}

    def run(region: Graph, args: Sequence[Any], lowering: Any) -> list[Any]:
        return _run(region, by_region[id(region)], args, truth)

    scope, settings = _jax.equation_context(*node.source)
    with scope, settings:
        return bind(node, operands, Lowering(), run)


def _through_gates(
    values: Sequence[Any], gates: Sequence[When | None] | None, truth: Truth
) -> list[Any]:
    if gates is None:
        return list(values)
    pairs = zip(values, gates, strict=True)
    return [value if when is None else _gate(value, truth(when)) for value, when in pairs]


@jax.custom_vjp
def _gate(value: Any, is_open: Any) -> Any:
    return value


def _gate_forward(value: Any, is_open: Any) -> tuple[Any, Any]:
    return value, is_open


def _gate_backward(is_open: Any, cotangent: Any) -> tuple[Any, None]:
    # One operation, by which `_through` knows it.
    return jax.lax.select_n(is_open, jnp.zeros_like(cotangent), cotangent), None


_gate.defvjp(_gate_forward, _gate_backward)
