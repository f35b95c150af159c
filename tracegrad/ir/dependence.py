"""What depends on what in a program: for every result, the inputs that can reach it.

A set of inputs is a bit mask: bit i for the i-th. `spread` carries masks forward through a graph;
what a node does to them is the caller's rule, so that the same walk answers "which inputs does
this output depend on" and "which inputs get a gradient from it".
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TypeVar

from tracegrad import _jax
from tracegrad.ir.graph import Graph
from tracegrad.ir.nodes import Atom, CustomGradient, Node, Recompute, Value, is_reference

T = TypeVar("T")
Masks = list[int]
Run = Callable[[Graph, Masks], Masks]  # a region's input masks -> its output masks
Rule = Callable[[Node, Masks], Masks]  # a node's input masks -> its output masks

# One program on the operands as they are.
_CALLS = frozenset({"jit", "closed_call", "core_call", "shard_map"})
# Each result is computed from the operand in the same place.
_ELEMENTWISE_TUPLES = frozenset({"optimization_barrier"})


def dependence(graph: Graph) -> Masks:
    """For every output of a graph, the inputs that it depends on through any data flow.

    Exact for what is computed from operands; through a loop it is the fixed point over all
    iterations, none included unless a scan is known to run; through a branch the union over the
    branches (and the predicate). Where JAX alone knows what a region means, every result depends
    on every operand.
    """
    return spread(graph, of_each([True] * len(graph.inputs)), _data_flow())


def data_flow(node: Node, ins: Masks) -> Masks:
    """The rule of plain data flow."""
    return _data_flow()(node, ins)


def _data_flow() -> Rule:
    """That rule; it remembers what it found about the regions that it has entered, so that regions
    shared by regions that are shared take no more time than others."""
    known: dict[tuple[Graph, tuple[int, ...]], Masks] = {}

    def run(region: Graph, ins: Masks) -> Masks:
        key = region, tuple(ins)
        if key not in known:
            known[key] = spread(region, ins, rule)
        return known[key]

    def rule(node: Node, ins: Masks) -> Masks:
        if node.regions and any(ins) and (entered := enter(node, ins, run)) is not None:
            return entered[0]
        if node.primitive.name in _ELEMENTWISE_TUPLES:
            return ins
        return [functools.reduce(operator.or_, ins, 0)] * len(node.outputs)

    return rule


def node_dependence(node: Node) -> Masks:
    """For every result of a node, the operands (by position) that it depends on."""
    return data_flow(node, of_each([True] * len(node.inputs)))


def of_each(chosen: Iterable[bool]) -> Masks:
    """For each of several inputs or operands a mask of itself; of those not chosen none."""
    return [1 << i if is_chosen else 0 for i, is_chosen in enumerate(chosen)]


def spread(
    graph: Graph, inputs: Masks, rule: Rule, record: MutableMapping[Value, int] | None = None
) -> Masks:
    """Carries masks from the inputs of a graph to its outputs; returns those.

    `record`, if given, is filled with the mask of every value.
    """
    masks: MutableMapping[Value, int] = {} if record is None else record
    masks.update(zip(graph.inputs, inputs, strict=True))
    for node in graph.nodes:
        # Without calls of functions for each operand: this is done for every node of a program.
        ins = [masks.get(v, 0) if isinstance(v, Value) else 0 for v in node.inputs]
        outs = rule(node, ins)
        masks.update(zip(node.outputs, outs, strict=True))
        for value in node.inputs:
            if isinstance(value, Value) and is_reference(value):
                # It may have been written to.
                masks[value] = joined(ins)
    return [mask_of(value, masks) for value in graph.outputs]


def spread_below(graph: Graph, inputs: Masks) -> dict[Value, int]:
    """The mask of every value in a graph and in the regions below it, by plain data flow; of a
    region that is entered several times the union."""
    found: dict[Value, int] = {}
    known: dict[tuple[Graph, tuple[int, ...]], Masks] = {}

    def run(region: Graph, ins: Masks) -> Masks:
        key = region, tuple(ins)
        if key not in known:
            record: dict[Value, int] = {}
            known[key] = spread(region, ins, rule, record)
            for value, mask in record.items():
                found[value] = found.get(value, 0) | mask
        return known[key]

    def rule(node: Node, ins: Masks) -> Masks:
        entered = enter(node, ins, run)
        return [joined(ins)] * len(node.outputs) if entered is None else entered[0]

    run(graph, inputs)
    return found


def joined(masks: Iterable[int]) -> int:
    """The union of masks."""
    return functools.reduce(operator.or_, masks, 0)


def mask_of(value: Atom, masks: Mapping[Value, int]) -> int:
    """The mask of a node's operand; constants and literals have none."""
    return masks.get(value, 0) if isinstance(value, Value) else 0


def enter(node: Node, ins: Masks, run: Run) -> tuple[Masks, dict[str, Masks]] | None:
    """Carries masks through the regions of a node, to the fixed point of its loop.

    Returns the masks of its results, and for each region the masks of its inputs; None for a node
    without regions, or with regions of which only JAX knows how they are called.
    """
    regions = node.regions
    if not regions or any(is_reference(v) for v in node.inputs):
        return None
    if isinstance(node, (Recompute, CustomGradient)) or node.op in _CALLS:
        name, region = next(iter(regions.items()))
        return run(region, ins), {name: ins}
    if node.primitive is _jax.COND:
        branches = [run(region, ins[1:]) for region in regions.values()]
        outs = [ins[0] | joined(masks) for masks in zip(*branches, strict=True)]
        return outs, dict.fromkeys(regions, ins[1:])
    if node.primitive is _jax.SCAN:
        return _enter_scan(node, ins, run)
    if node.primitive in _jax.WHILES:
        return _enter_while(node, ins, run)
    return None


def _enter_scan(node: Node, ins: Masks, run: Run) -> tuple[Masks, dict[str, Masks]]:
    constants, carried = _jax.scan_split(node.params)
    first, last = constants, constants + carried
    while True:
        outs = run(node.regions["jaxpr"], ins)
        carry = [a | b for a, b in zip(ins[first:last], outs, strict=False)]
        if carry == ins[first:last]:
            length = node.params["length"]
            if not isinstance(length, int) or length == 0:
                # With no iteration at all, what went in comes out.
                outs = [*carry, *outs[carried:]]
            return outs, {"jaxpr": ins}
        ins = [*ins[:first], *carry, *ins[last:]]


def _enter_while(node: Node, ins: Masks, run: Run) -> tuple[Masks, dict[str, Masks]]:
    split = node.params["cond_nconsts"]
    start = split + node.params["body_nconsts"]
    condition, body = node.regions["cond_jaxpr"], node.regions["body_jaxpr"]
    carry = ins[start:]
    while True:
        (again,) = run(condition, [*ins[:split], *carry])
        outs = run(body, [*ins[split:start], *carry])
        more = [a | b | again for a, b in zip(carry, outs, strict=True)]
        if more == carry:
            regions = {
                "cond_jaxpr": [*ins[:split], *carry],
                "body_jaxpr": [*ins[split:start], *carry],
            }
            return carry, regions
        carry = more


# --------------------------------------------------------------------------------------- liveness


def leading_to(graph: Graph, outputs: Sequence[bool], rule: Rule | None = None) -> set[Value]:
    """The values from which data flows to the chosen outputs of a graph; `rule`: which of its
    operands reach each result of a node, if not all the data."""
    live = {
        value
        for value, chosen in zip(graph.outputs, outputs, strict=True)
        if chosen and isinstance(value, Value)
    }
    rule = rule or _data_flow()
    for node in reversed(graph.nodes):
        wanted = [value in live for value in node.outputs]
        if any(is_reference(v) and v in live for v in node.inputs):  # it may be written to
            live |= set(node.operands)
        elif any(wanted):
            masks = rule(node, of_each([True] * len(node.inputs)))
            for mask, is_wanted in zip(masks, wanted, strict=True):
                if is_wanted:
                    live |= {
                        v
                        for i, v in enumerate(node.inputs)
                        if isinstance(v, Value) and mask >> i & 1
                    }
    return live


def region_outputs_leading_to(
    node: Node, name: str, outputs: Sequence[bool], rule: Rule | None = None
) -> list[bool]:
    """Which outputs of a node's region flow to the chosen results of the node; `rule`: as of
    `leading_to`, for the nodes of the region."""
    region = node.regions[name]
    if node.primitive in _jax.WHILES:
        return [True] * len(region.outputs)  # each may decide when the loop ends

    def back(wanted: list[bool]) -> list[bool]:
        live = leading_to(region, wanted, rule)
        return [value in live for value in region.inputs]

    return back_around(node, outputs, back, operator.or_)


def back_around(
    node: Node,
    outputs: Sequence[T],
    back: Callable[[list[T]], Sequence[T]],
    join: Callable[[T, T], T],
) -> list[T]:
    """What comes back to the outputs of a loop's body: from behind the loop, and from the
    iterations that follow, to the fixed point.

    Args:
      node: a node with regions; in one that is no loop nothing goes round.
      outputs: for each output of the body what comes from behind the loop.
      back: carries that through the body, from its outputs to its inputs.
      join: of what comes from both.
    """
    first, carried = 0, 0
    if node.primitive is _jax.SCAN:
        first, carried = _jax.scan_split(node.params)
    elif node.primitive in _jax.WHILES:
        first, carried = node.params["body_nconsts"], len(outputs)
    found = list(outputs)
    while carried:
        more = [*map(join, found, back(found)[first : first + carried]), *found[carried:]]
        if more == found:
            break
        found = more
    return found
