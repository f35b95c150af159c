"""Which inputs of a program get a gradient from its outputs, and what cuts the others off.

An input is *connected* to an output if there is a path of data flow between them on which the VJP
of every node depends on its cotangent. That is decided on the program, never on values: a gradient
that happens to be zero is connected. Whether a VJP depends on its cotangent JAX is asked, node by
node: the VJP is traced, imported, and looked through. ``round``, ``floor`` and ``sign`` cut because
JAX's derivative of them is zero by structure; so does the rule of a custom gradient that returns
nothing, or zeros, for an input.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Apply, CustomGradient, Graph, Node, Occurrence, StopGradient, Value
from tracegrad.ir.dependence import (
    Masks,
    dependence,
    enter,
    is_reference,
    joined,
    leading_to,
    mask_of,
    node_dependence,
    region_outputs_leading_to,
    spread,
)
from tracegrad.ir.occurrence import Path
from tracegrad.lowering.closed_over import loses_derivative
from tracegrad.rewriting.forward_mode import place_of
from tracegrad.tracing.importer import import_program

# How often a region is looked through for cuts: once for each path of calls that leads to it.
_VISITS = 64

# The VJPs of operations without regions that are remembered: all of a big model has some hundreds.
_REMEMBERED = 4096


class UnconnectedError(ValueError):
    """A gradient was asked for that does not exist.

    The message names each leaf that gets none, and what cuts it off at which of the user's lines.
    """


@dataclass(frozen=True)
class Cut:
    """A node at which the gradient on its way to an input ends."""

    occurrence: Occurrence
    results: tuple[Value, ...]  # its results whose cotangents go no further

    def __str__(self) -> str:
        node, origin = self.occurrence.node, self.occurrence.origin
        place = "" if origin is None else f" at {origin}"
        dtype = getattr(self.results[0].aval, "dtype", None)
        if isinstance(node, StopGradient):
            return f"stop_gradient{place}"
        if isinstance(node, CustomGradient):
            face = "backward" if node.kind == "vjp" else "derivative"
            place = place_of(self.occurrence)
            return f"the custom gradient {node.name}{place}, whose {face} gives it nothing"
        if _is_connectable(self.results[0].aval):
            return f"{node.name}{place}, whose derivative is zero"
        if node.op == "convert_element_type":
            return f"the conversion to {dtype}{place}"
        return f"{node.name}{place}, whose result is {dtype}"


def connections(graph: Graph) -> list[frozenset[int]]:
    """For every output of a graph, the inputs (by position) that are connected to it."""
    walk = Walk()
    outs = spread(graph, _sources(graph), walk.rule)
    return [
        frozenset(i for i in range(len(graph.inputs)) if mask >> i & 1)
        if _is_connectable(value.aval)
        else frozenset()
        for mask, value in zip(outs, graph.outputs, strict=True)
    ]


def cuts(graph: Graph, source: int, target: int) -> list[Cut]:
    """Where the gradient of one output is cut off from one input, on every path between them.

    Empty if nothing that leads to the output uses the input (or if they are connected). A cut
    inside of a call, loop, branch or recomputed region is that of the innermost node. Of a function
    that is called in more than some hundred places the cuts of the first of them are given.
    """
    wanted = [i == target for i in range(len(graph.outputs))]
    found = Walk().cuts(graph, _sources(graph), wanted, 1 << source, ())
    return list(dict.fromkeys(found))


def explain_unconnected(graph: Graph, source: int, target: int) -> str:
    """Why an input gets no gradient from an output, in words."""
    aval = graph.inputs[source].aval
    if not _is_connectable(aval):
        return f"it is {aval.dtype}, which has no gradient"
    found = [f"cut by {text}" for text in dict.fromkeys(map(str, cuts(graph, source, target)))]
    if not found:
        return "nothing that leads to the output uses it"
    more = f", and in {len(found) - 3} more places" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def _sources(graph: Graph) -> Masks:
    return [1 << i if _is_connectable(v.aval) else 0 for i, v in enumerate(graph.inputs)]


def _is_connectable(aval: Any) -> bool:
    """Whether a gradient can arrive at values of a type (or at what is written to a Ref)."""
    return is_reference(aval) or _jax.has_gradient(aval)


# ------------------------------------------------------------------------------- the forward walk


@dataclass
class Walk:
    """One walk over a graph: shared regions and custom rules are looked at once."""

    regions: dict[tuple[Graph, tuple[int, ...]], Masks] = field(default_factory=dict)
    rules: dict[tuple[Node, tuple[bool, ...]], tuple[int, ...] | None] = field(default_factory=dict)
    flows: dict[Node, Masks] = field(default_factory=dict)
    visits: Counter[Any] = field(default_factory=Counter)

    def rule(self, node: Node, ins: Masks) -> Masks:
        """Masks of the inputs connected to each result, given those connected to each operand."""
        if isinstance(node, StopGradient) or not any(ins):
            return [0] * len(node.outputs)
        outs = self._outs(node, ins)
        return [
            m if _is_connectable(v.aval) else 0 for m, v in zip(outs, node.outputs, strict=True)
        ]

    def _outs(self, node: Node, ins: Masks) -> Masks:
        if any(is_reference(v.aval) for v in (*node.inputs, *node.outputs)):
            # What is written to a Ref may be read anywhere; JAX differentiates it as a whole.
            return [joined(ins)] * len(node.outputs)
        # The operations inside a shard_map can be differentiated only inside their mesh.
        if not isinstance(node, CustomGradient) and node.op != "shard_map":
            entered = enter(node, ins, self.region)
            if entered is not None:
                return entered[0]
        reached = tuple(mask != 0 for mask in ins)
        rows = self.vjp_rows(node, reached)
        return [joined(m for i, m in enumerate(ins) if row >> i & 1) for row in rows]

    def region(self, graph: Graph, ins: Masks) -> Masks:
        key = graph, tuple(ins)
        if key not in self.regions:
            self.regions[key] = spread(graph, ins, self.rule)
        return self.regions[key]

    def vjp_rows(self, node: Node, reached: tuple[bool, ...]) -> tuple[int, ...]:
        """For every result of a node, the operands whose cotangents depend on its cotangent."""
        avals = tuple(value.aval for value in node.inputs)
        out_avals = tuple(value.aval for value in node.outputs)
        if isinstance(node, Apply):
            params = tuple(sorted(node.params.items()))
            try:
                rows = _remembered_rows(node.primitive, params, avals, out_avals, reached)
            except TypeError:  # a parameter that cannot be hashed
                rows = _rows(node.primitive, params, avals, out_avals, reached)
        else:
            key = node, reached
            if key not in self.rules:
                params = tuple(node.params.items())
                # What is closed over and lost counts as connected: differentiating it is an error.
                lost = isinstance(node, CustomGradient) and loses_derivative(node, reached)
                self.rules[key] = (
                    None if lost else _rows(node.primitive, params, avals, out_avals, reached)
                )
            rows = self.rules[key]
        if rows is not None:
            return rows
        if isinstance(node, CustomGradient):  # its rule may use what its primal does not
            everything = joined(1 << i for i, is_reached in enumerate(reached) if is_reached)
            return tuple(everything if _jax.has_gradient(aval) else 0 for aval in out_avals)
        return tuple(node_dependence(node))

    def cuts(
        self, graph: Graph, ins: Masks, wanted: Sequence[bool], bit: int, path: Path
    ) -> list[Cut]:
        """The cuts between the inputs that carry `bit` and the wanted outputs."""
        # The paths to a region that is shared by regions that are shared are too many for all.
        visit = graph, tuple(ins), tuple(wanted)
        self.visits[visit] += 1
        if self.visits[visit] > _VISITS:
            return []
        masks: dict[Value, int] = {}
        spread(graph, ins, self.rule, masks)
        live = leading_to(graph, wanted)
        found: list[Cut] = []
        for node in graph.nodes:
            operands = [mask_of(value, masks) for value in node.inputs]
            carrying = joined(1 << i for i, mask in enumerate(operands) if mask & bit)
            if not carrying:
                continue
            flow = self._flow(node)
            lost = [
                value in live and not masks[value] & bit and bool(flow[k] & carrying)
                for k, value in enumerate(node.outputs)
            ]
            if any(lost):
                found += self._inside(node, operands, lost, bit, path) or [
                    Cut(
                        Occurrence(path, node),
                        tuple(v for v, is_lost in zip(node.outputs, lost, strict=True) if is_lost),
                    )
                ]
        return found

    def _flow(self, node: Node) -> Masks:
        if node not in self.flows:
            self.flows[node] = node_dependence(node)
        return self.flows[node]

    def _inside(
        self, node: Node, ins: Masks, lost: Sequence[bool], bit: int, path: Path
    ) -> list[Cut]:
        entered = None if isinstance(node, CustomGradient) else enter(node, ins, self.region)
        found = []
        for name, masks in entered[1].items() if entered is not None else ():
            wanted = region_outputs_leading_to(node, name, lost)
            found += self.cuts(node.regions[name], masks, wanted, bit, (*path, (node, name)))
        return found


# -------------------------------------------------------------------------------- one node's VJP

Params = tuple[tuple[str, Any], ...]


@functools.lru_cache(maxsize=_REMEMBERED)
def _remembered_rows(
    primitive: Any,
    params: Params,
    avals: tuple[Any, ...],
    out_avals: tuple[Any, ...],
    reached: tuple[bool, ...],
) -> tuple[int, ...] | None:
    return _rows(primitive, params, avals, out_avals, reached)


def _rows(
    primitive: Any,
    params: Params,
    avals: tuple[Any, ...],
    out_avals: tuple[Any, ...],
    reached: tuple[bool, ...],
) -> tuple[int, ...] | None:
    """For every result the operands whose cotangents depend on it, among those that are reached.

    None where JAX cannot differentiate the node in reverse: then it counts as connected, and the
    gradient itself raises JAX's own error.
    """
    active = [i for i, is_reached in enumerate(reached) if is_reached]
    flowing = [aval for aval in out_avals if _jax.has_gradient(aval)]

    def pullback(args: list[Any], cotangents: list[Any]) -> list[Any]:
        def run(operands: list[Any]) -> list[Any]:
            return _jax.bind(primitive, operands, dict(params))

        bound = _jax.of_some(run, args, active)
        _, vjp = jax.vjp(bound, *(args[i] for i in active))
        return list(vjp(_jax.align(out_avals, cotangents)))

    try:
        program = jax.make_jaxpr(pullback)(list(avals), flowing)
    except Exception:
        return None
    results = dependence(import_program(program))
    rows, position = [], len(avals)
    for aval in out_avals:
        row = 0
        if _jax.has_gradient(aval):
            row = joined(
                1 << i for i, mask in zip(active, results, strict=True) if mask >> position & 1
            )
            position += 1
        rows.append(row)
    return tuple(rows)
