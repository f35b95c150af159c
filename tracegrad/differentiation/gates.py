"""Where a function needs gates, so that its gradient is right for every choice of its results.

See `cotangent_flags`, which runs what is planned here. What flows is asked of JAX, node by node, as
in `connectivity`; how JAX goes about loops and branches is followed: what a step does not need for
the results that have a cotangent, it does not differentiate.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracegrad import _jax
from tracegrad._jax.caches import once_for_each
from tracegrad.differentiation.connectivity import Walk
from tracegrad.ir import CustomGradient, Graph, Literal, Node, Recompute, StopGradient, Value
from tracegrad.ir.dependence import back_around, enter, mask_of, spread
from tracegrad.ir.operations import ADDITIVE, LINEAR

_NAME = "tracegrad.flags "

When = frozenset[frozenset[int]]
"""A condition: one of these sets of flags is there. A flag is known by its place among the operands
of the gradient program, the first of which are those of the program."""

NEVER: When = frozenset()
ALWAYS: When = frozenset({frozenset()})


def either(one: When, other: When) -> When:
    """That one of two conditions holds."""
    return _fewest(one | other)


def _both(one: When, other: When) -> When:
    return _fewest(frozenset({a | b for a in one for b in other}))


def any_of(conditions: Sequence[When]) -> When:
    """That one of several holds."""
    return functools.reduce(either, conditions, NEVER)


def _fewest(when: When) -> When:
    """Without the sets of which fewer flags are enough."""
    if len({len(flags) for flags in when}) < 2:
        return when
    return frozenset({flags for flags in when if not any(fewer < flags for fewer in when)})


def name_of(when: When) -> str:
    """What the truth of a condition is called in a program, so that `_condition` knows it."""
    return _NAME + json.dumps(sorted(map(sorted, when)))


def names_condition(node: Node) -> bool:
    """Whether the result of a node is the truth of a condition."""
    return node.op == "name" and str(node.params["name"]).startswith(_NAME)


# The truth of a condition may be handed on by these, to fit what it is put beside.
_MOVING = frozenset({"broadcast_in_dim", "squeeze", "reshape", "pvary"})


def _condition(value: Value | Literal, known: dict[Value, When | None]) -> When | None:
    """The condition that a value is the truth of, if it is that of a gate."""
    if isinstance(value, Literal) or getattr(value.aval, "dtype", None) != np.dtype(bool):
        return None
    producer = value.producer
    if producer is None:
        return known.get(value)
    if names_condition(producer):
        flags = json.loads(str(producer.params["name"]).removeprefix(_NAME))
        return frozenset(map(frozenset, flags))
    if producer.op in _MOVING:
        return _condition(producer.inputs[0], known)
    return _condition_within(producer, producer.outputs.index(value), known)


def _condition_within(node: Node, result: int, known: dict[Value, When | None]) -> When | None:
    """That of a result of a call or a branch. JAX has the forward pass of one hand on what the
    backward pass needs, and the branches that hand on nothing leave the place empty."""
    if node.primitive not in (_jax.JIT, _jax.COND) and node.op != "shard_map":
        return None
    given = [_condition(v, known) for v in node.inputs[node.primitive is _jax.COND :]]
    found = {
        _condition(region.outputs[result], dict(zip(region.inputs, given, strict=True)))
        for region in node.regions.values()
        if not _is_empty(region.outputs[result])
    }
    return found.pop() if len(found) == 1 else None


def _is_empty(value: Value | Literal) -> bool:
    producer = None if isinstance(value, Literal) else value.producer
    return producer is not None and producer.op in ("empty", "empty2")


# ------------------------------------------------------------------------------------------ plans


@dataclass(frozen=True)
class Edge:
    """How a value is read: when a gradient comes from there, and whether it is zeros otherwise."""

    when: When
    is_clean: bool


@dataclass(frozen=True)
class Inner:
    """The gates of a region, and those for its inputs; None: there is none for this one."""

    plan: Plan
    entries: list[When | None]

    @property
    def is_gated(self) -> bool:
        return self.plan.is_gated or any(self.entries)


@dataclass
class Plan:
    """Where the gates of a graph are."""

    inputs: list[Edge] = field(default_factory=list)  # how each is read
    operands: dict[Node, list[When | None]] = field(default_factory=dict)
    # Nodes that run once for each group of results (by position), with gates of its own.
    apart: dict[Node, list[tuple[list[int], list[When | None]]]] = field(default_factory=dict)
    outputs: list[When | None] = field(default_factory=list)
    inner: dict[Node, dict[str, Inner]] = field(default_factory=dict)  # by the name of the region

    @property
    def is_gated(self) -> bool:
        return bool(self.operands or self.apart or self.inner or any(self.outputs))


@dataclass
class Planner:
    """Finds the gates of a graph and its regions; those that are shared are looked at once."""

    walk: Walk = field(default_factory=Walk)

    @once_for_each
    def plan(
        self,
        graph: Graph,
        reached: Sequence[int],
        outs: Sequence[Edge],
        told: Sequence[When | None],
    ) -> Plan:
        """The gates of a graph.

        Args:
          graph: a graph.
          reached: for each input, whether it is differentiated with respect to.
          outs: how each output is read.
          told: for each input, the condition that it is the truth of; None: it is something else.
        """
        perturbed: dict[Value, int] = {}
        spread(graph, list(reached), self.walk.rule, perturbed)
        conditions = dict(zip(graph.inputs, told, strict=True))
        read_by: dict[Any, list[Edge]] = {}
        made_when: dict[Any, When] = {}

        def read(values: Sequence[Value | Literal], edges: Sequence[Edge]) -> None:
            for value, edge in zip(values, edges, strict=True):
                if edge.when and mask_of(value, perturbed):
                    read_by.setdefault(value, []).append(edge)
                    made_when[value] = either(made_when.get(value, NEVER), edge.when)

        def made(value: Value) -> Edge:
            when = made_when.get(value, NEVER)
            edges = read_by.get(value, ())
            return Edge(when, all(edge.is_clean for edge in edges if edge.when == when))

        read(graph.outputs, outs)
        plan, operands_of = Plan(), dict[Node, list[Edge]]()
        groups_of: dict[Node, list[tuple[list[int], list[Edge]]]] = {}
        for node in reversed(graph.nodes):
            ins = [mask_of(v, perturbed) for v in node.inputs]
            results = [made(v) for v in node.outputs]
            if not any(ins) or not any(edge.when for edge in results):
                continue
            groups = _groups(node, results)
            if groups:
                rows = self.walk.vjp_rows(node, tuple(i != 0 for i in ins))
                groups_of[node] = [
                    (places, _read_by_some(results, rows, places, len(ins))) for places in groups
                ]
                for _, edges in groups_of[node]:
                    read(node.inputs, edges)
                continue
            given = [_condition(v, conditions) for v in node.inputs]
            operands, whens, inner = self._through(node, ins, results, given)
            made_when.update(zip(node.outputs, whens, strict=True))
            if any(each.is_gated for each in inner.values()):
                plan.inner[node] = inner
            operands_of[node] = operands
            read(node.inputs, operands)

        def gate(value: Value | Literal, edge: Edge) -> When | None:
            is_open = edge.is_clean or value not in read_by or edge.when == made_when[value]
            return None if is_open else edge.when or None

        def gates(values: Sequence[Value | Literal], edges: Sequence[Edge]) -> list[When | None]:
            return [gate(v, edge) for v, edge in zip(values, edges, strict=True)]

        for node, operands in operands_of.items():
            if any(found := gates(node.inputs, operands)):
                plan.operands[node] = found
        for node, groups_read in groups_of.items():
            plan.apart[node] = [(each, gates(node.inputs, edges)) for each, edges in groups_read]
        plan.outputs = gates(graph.outputs, outs)
        plan.inputs = [made(v) for v in graph.inputs]
        return plan

    def _through(
        self, node: Node, ins: list[int], results: list[Edge], told: Sequence[When | None]
    ) -> tuple[list[Edge], list[When], dict[str, Inner]]:
        """How a node reads its operands, given how its results are read; when each result is made,
        since some are made together; and the gates inside of it."""
        if isinstance(node, StopGradient):
            return [Edge(NEVER, True)] * len(ins), [e.when for e in results], {}
        inner = self._inside(node, ins, results, told)
        if inner is not None:
            return inner
        rows = self.walk.vjp_rows(node, tuple(i != 0 for i in ins))
        is_clean = all(e.is_clean for e in results) and _makes_zeros_of_zeros(node)
        pairs = list(zip(results, rows, strict=True))
        operands = [
            Edge(any_of([e.when for e, row in pairs if row >> i & 1]), is_clean)
            for i in range(len(ins))
        ]
        if node.op == "select_n" and told[0] is not None:  # a gate: see `_gate`
            operands[2] = Edge(_both(operands[2].when, told[0]), is_clean)
        return operands, [any_of([e.when for e in results])] * len(results), {}

    def _inside(
        self, node: Node, ins: list[int], results: list[Edge], told: Sequence[When | None]
    ) -> tuple[list[Edge], list[When], dict[str, Inner]] | None:
        """The same of a node whose regions JAX differentiates by what is in them."""
        is_call = (
            isinstance(node, Recompute)
            or (node.primitive is _jax.JIT and not has_jit_settings(node))
            or node.op == "shard_map"
        )
        entered = None
        if is_call or node.primitive in (_jax.SCAN, _jax.COND):
            entered = enter(node, ins, self.walk.region)
        if entered is None:
            return None
        carried = range(0)
        if node.primitive is _jax.COND:
            told = told[1:]
        if node.primitive is _jax.SCAN:
            constants, count = _jax.scan_split(node.params)
            told = [*told[:constants], *[None] * (len(told) - constants)]
            carried = range(constants, constants + count)

        def plans_of(outs: Sequence[Edge]) -> dict[str, Plan]:
            return {
                name: self.plan(node.regions[name], reached, outs, told)
                for name, reached in entered[1].items()
            }

        def back(outs: Sequence[Edge]) -> list[Edge]:
            by_input = zip(*(plan.inputs for plan in plans_of(outs).values()), strict=True)
            return [Edge(any_of([e.when for e in edges]), False) for edges in by_input]

        # What a loop carries goes on to its next step.
        outs = back_around(
            node, results, back, lambda out, next_in: Edge(either(out.when, next_in.when), False)
        )
        plans, operands = plans_of(outs), back(outs)
        for edge, i in zip(outs, carried, strict=False):
            operands[i] = edge
        if is_call:
            operands = next(iter(plans.values())).inputs
        inner = {
            name: Inner(plan, list(map(entry, plan.inputs, operands)))
            for name, plan in plans.items()
        }
        for i in carried:
            if not ins[i]:  # the first is constant, those of further steps are not
                operands[i] = Edge(NEVER, True)
        if node.primitive is _jax.COND:
            operands = [Edge(NEVER, True), *operands]
        return operands, [e.when for e in outs], inner


def _groups(node: Node, results: Sequence[Edge]) -> list[list[int]]:
    """The results of a node by when a gradient comes to them, if each group is to be differentiated
    by itself: JAX leaves out of the derivative of an operation, or of a function with a
    `jax.custom_jvp`, what leads to results without a cotangent. A `jax.custom_vjp` gets zeros."""
    of_jax = node.kind == "jvp" if isinstance(node, CustomGradient) else not node.regions
    groups: dict[When, list[int]] = {}
    for i, edge in enumerate(results):
        groups.setdefault(edge.when, []).append(i)
    is_apart = of_jax and not node.effects and len(groups.keys() - {NEVER}) > 1
    return list(groups.values()) if is_apart and not _makes_zeros_of_zeros(node) else []


def _read_by_some(
    results: Sequence[Edge], rows: Sequence[int], places: Sequence[int], count: int
) -> list[Edge]:
    """How a node reads its operands for some of its results; `rows`: by which these have them."""
    return [
        Edge(any_of([results[k].when for k in places if rows[k] >> i & 1]), False)
        for i in range(count)
    ]


def entry(read: Edge, given: Edge) -> When | None:
    """The gate for what a region reads when `read`, and is given to it as if `given`."""
    return None if read.is_clean or read.when == given.when else read.when or None


def _makes_zeros_of_zeros(node: Node) -> bool:
    """Whether the VJP of a node is finite whatever its operands are."""
    if node.op in LINEAR or node.op in ADDITIVE or node.op == "select_n":
        return True
    if node.op == "div":
        scales = [v.value for v in node.inputs[1:] if isinstance(v, Literal) and v.value != 0]
    else:
        scales = [v.value for v in node.inputs if isinstance(v, Literal) and node.op == "mul"]
    return any(map(np.isfinite, scales))
