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

What flows is asked of JAX, as in `connectivity`.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.ir import Graph, Literal, Node, Recompute, StopGradient, Value
from tracegrad.ir.dependence import enter, is_reference, mask_of, spread
from tracegrad.ir.operations import ADDITIVE, LINEAR
from tracegrad.lowering import Lowering, evaluate, evaluate_node
from tracegrad.lowering.regions import bind, has_jit_settings

_NAME = "tracegrad.flags "
_named: Callable[[Any, str], Any] = checkpoint_name

# ------------------------------------------------------------------------------------- conditions

When = frozenset[frozenset[int]]
"""A condition: one of these sets of flags is there. A flag is known by its place among the operands
of the gradient program, the first of which are those of the program."""

NEVER: When = frozenset()
ALWAYS: When = frozenset({frozenset()})
_REMEMBERED = 4096  # a model has as many as it has layers


@functools.lru_cache(maxsize=_REMEMBERED)
def _either(one: When, other: When) -> When:
    found = one | other
    if len({len(flags) for flags in found}) < 2:
        return found
    return frozenset(flags for flags in found if not any(fewer < flags for fewer in found))


@functools.lru_cache(maxsize=_REMEMBERED)
def _both(one: When, other: When) -> When:
    pairs = (frozenset({a | b}) for a in one for b in other)
    return functools.reduce(_either, pairs, NEVER)


def _any(conditions: Sequence[When]) -> When:
    return functools.reduce(_either, conditions, NEVER)


# ------------------------------------------------------------------------------------------ gates


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
    outputs: list[When | None] = field(default_factory=list)
    inner: dict[Node, dict[str, Inner]] = field(default_factory=dict)  # by the name of the region

    @property
    def is_gated(self) -> bool:
        return bool(self.operands or self.inner or any(self.outputs))


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
    nodes = (node for region in graph.regions_below for node in region.nodes)
    if any(is_reference(v.aval) for node in nodes for v in (*node.inputs, *node.outputs)):
        return None
    first = len(graph.inputs) + len(flowing)
    flags = {j: frozenset({frozenset({k})}) for k, j in enumerate(flowing, first)}
    if len(flowing) == 1:
        flags = dict.fromkeys(flowing, ALWAYS)
    reached = [int(i in active) for i in range(len(graph.inputs))]
    outs = [Edge(flags.get(j, NEVER), True) for j in range(len(graph.outputs))]
    plan = _Planner().plan(graph, reached, outs, [None] * len(reached))
    whole = Edge(_any(list(flags.values())), False)
    inner = Inner(plan, [_entry(edge, whole) for edge in plan.inputs])
    return Gated(graph, inner, first) if inner.is_gated else None


@dataclass
class _Planner:
    """Finds the gates of a graph and its regions; those that are shared are looked at once."""

    walk: Walk = field(default_factory=Walk)
    known: dict[Any, Plan] = field(default_factory=dict)

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
        key = graph, tuple(reached), tuple(outs), tuple(told)
        if key not in self.known:
            self.known[key] = self._planned(graph, reached, outs, told)
        return self.known[key]

    def _planned(
        self,
        graph: Graph,
        reached: Sequence[int],
        outs: Sequence[Edge],
        told: Sequence[When | None],
    ) -> Plan:
        perturbed: dict[Value, int] = {}
        spread(graph, list(reached), self.walk.rule, perturbed)
        conditions = dict(zip(graph.inputs, told, strict=True))
        read_by: dict[Any, list[Edge]] = {}
        made_when: dict[Any, When] = {}

        def read(values: Sequence[Value | Literal], edges: Sequence[Edge]) -> None:
            for value, edge in zip(values, edges, strict=True):
                if edge.when and mask_of(value, perturbed):
                    read_by.setdefault(value, []).append(edge)
                    made_when[value] = _either(made_when.get(value, NEVER), edge.when)

        def made(value: Value) -> Edge:
            when = made_when.get(value, NEVER)
            edges = read_by.get(value, ())
            return Edge(when, all(edge.is_clean for edge in edges if edge.when == when))

        read(graph.outputs, outs)
        plan, operands_of = Plan(), {}
        for node in reversed(graph.nodes):
            ins = [mask_of(v, perturbed) for v in node.inputs]
            results = [made(v) for v in node.outputs]
            if not any(ins) or not any(edge.when for edge in results):
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

        for node, operands in operands_of.items():
            gates = [gate(v, edge) for v, edge in zip(node.inputs, operands, strict=True)]
            if any(gates):
                plan.operands[node] = gates
        plan.outputs = [gate(v, edge) for v, edge in zip(graph.outputs, outs, strict=True)]
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
            Edge(_any([e.when for e, row in pairs if row >> i & 1]), is_clean)
            for i in range(len(ins))
        ]
        if node.op == "select_n" and told[0] is not None:  # a gate: see `_gate`
            operands[2] = Edge(_both(operands[2].when, told[0]), is_clean)
        return operands, [_any([e.when for e in results])] * len(results), {}

    def _inside(
        self, node: Node, ins: list[int], results: list[Edge], told: Sequence[When | None]
    ) -> tuple[list[Edge], list[When], dict[str, Inner]] | None:
        """The same of a node whose regions JAX differentiates by what is in them."""
        is_call = isinstance(node, Recompute) or (
            node.primitive is _jax.JIT and not has_jit_settings(node)
        )
        entered = None
        if is_call or node.primitive in (_jax.SCAN, _jax.COND):
            entered = enter(node, ins, self.walk.region)
        if entered is None:
            return None
        outs, carried = results, range(0)
        if node.primitive is _jax.COND:
            told = told[1:]
        if node.primitive is _jax.SCAN:
            constants, count = _jax.scan_split(node.params)
            told = [*told[:constants], *[None] * (len(told) - constants)]
            carried = range(constants, constants + count)
        while True:
            plans = {
                name: self.plan(node.regions[name], reached, outs, told)
                for name, reached in entered[1].items()
            }
            by_input = list(zip(*(plan.inputs for plan in plans.values()), strict=True))
            operands = [Edge(_any([e.when for e in edges]), False) for edges in by_input]
            # What a loop carries goes on to its next step.
            carry = [
                Edge(_either(out.when, operands[i].when), False)
                for out, i in zip(outs, carried, strict=False)
            ]
            more = [*carry, *outs[len(carry) :]]
            if more == outs:
                break
            outs = more
        for edge, i in zip(outs, carried, strict=False):
            operands[i] = edge if ins[i] else Edge(NEVER, True)
        if is_call:
            operands = next(iter(plans.values())).inputs
        inner = {
            name: Inner(plan, list(map(_entry, plan.inputs, operands)))
            for name, plan in plans.items()
        }
        if node.primitive is _jax.COND:
            operands = [Edge(NEVER, True), *operands]
        return operands, [e.when for e in outs], inner


def _entry(read: Edge, given: Edge) -> When | None:
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


# ------------------------------------------------------------------------------------------- run


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
                known[when] = _named(self._truth(when, args, together), _name(when))
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
    gates = [*inner.entries, *inner.plan.outputs, *itertools.chain(*inner.plan.operands.values())]
    below = [each for regions in inner.plan.inner.values() for each in regions.values()]
    return set(filter(None, gates)).union(*map(_conditions, below))


def _run(graph: Graph, inner: Inner, args: Sequence[Any], truth: Truth) -> list[Any]:
    if not inner.is_gated:
        return evaluate(graph, args, Lowering())
    plan = inner.plan
    args = _through_gates(args, inner.entries, truth)
    values: dict[Value, Any] = dict(graph.constants)
    values.update(zip(graph.inputs, args, strict=True))

    def read(wanted: Sequence[Value | Literal], gates: list[When | None] | None) -> list[Any]:
        found = [v.value if isinstance(v, Literal) else values[v] for v in wanted]
        return found if gates is None else _through_gates(found, gates, truth)

    lowering = Lowering()
    for node in graph.nodes:
        operands = read(node.inputs, plan.operands.get(node))
        if node in plan.inner:
            results = _run_inside(node, plan.inner[node], operands, truth)
        else:
            results = evaluate_node(node, operands, lowering)
        values.update(zip(node.outputs, results, strict=True))
    return read(graph.outputs, plan.outputs)


def _run_inside(node: Any, inner: dict[str, Inner], operands: list[Any], truth: Truth) -> list[Any]:
    """A node with gates in its regions, which close over their conditions."""
    by_region = {id(node.regions[name]): each for name, each in inner.items()}

    def run(region: Graph, args: Sequence[Any], lowering: Any) -> list[Any]:
        return _run(region, by_region[id(region)], args, truth)

    with _jax.equation_context(node.source.info, node.source.settings):
        return bind(node, operands, Lowering(), run)


def _through_gates(values: Sequence[Any], gates: Sequence[When | None], truth: Truth) -> list[Any]:
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


def _name(when: When) -> str:
    return _NAME + json.dumps(sorted(map(sorted, when)))


def _condition(value: Value | Literal, known: dict[Value, When | None]) -> When | None:
    """The condition that a value is the truth of, if it is that of a gate."""
    if isinstance(value, Literal):
        return None
    producer = value.producer
    if producer is None:
        return known.get(value)
    if producer.op != "name" or not str(producer.params["name"]).startswith(_NAME):
        return None
    flags = json.loads(str(producer.params["name"]).removeprefix(_NAME))
    return frozenset(map(frozenset, flags))
