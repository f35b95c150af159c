"""What depends on what in a program: for every result, the inputs that can reach it.

A set of inputs is a bit mask: bit i for the i-th. `spread` carries masks forward through a graph;
what a node does to them is the caller's rule, so that the same walk answers "which inputs does
this output depend on" and "which inputs get a gradient from it".
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import TypeVar

from tracegrad import _jax
from tracegrad.ir.graph import Graph
from tracegrad.ir.inlined import is_loop, may_take_no_step, region_calls
from tracegrad.ir.nodes import Atom, Node, Value, is_reference
from tracegrad.ir.operations import REARRANGES

T = TypeVar("T")
Masks = list[int]
Run = Callable[[Graph, Masks], Masks]  # a region's input masks -> its output masks
Rule = Callable[[Node, Masks], Masks]  # a node's input masks -> its output masks

# Each result is computed from the operand in the same place.
_ELEMENTWISE_TUPLES = frozenset({"optimization_barrier"})


def dependence(graph: Graph) -> Masks:
    """For every output of a graph, the inputs that it depends on through any data flow.

    Exact for what is computed from operands; through a loop it is the fixed point over all
    iterations, none included unless a scan is known to run; through a branch the union over the
    branches (and the predicate). Where JAX alone knows what a region means, every result depends
    on every operand.
    """
    return _data_flow()[0](graph, of_each([True] * len(graph.inputs)))


def data_flow(node: Node, ins: Masks) -> Masks:
    """The rule of plain data flow."""
    return _data_flow()[1](node, ins)


def spread_below(graph: Graph, inputs: Masks) -> dict[Value, int]:
    """The mask of every value in a graph and in the regions below it, by plain data flow; of a
    region that is entered several times the union."""
    found: dict[Value, int] = {}
    _data_flow(found)[0](graph, inputs)
    return found


def _data_flow(found: dict[Value, int] | None = None) -> tuple[Run, Rule]:
    """What carries masks through graphs, and through nodes. It remembers what it found about the
    regions that it has entered, so that regions shared by regions that are shared take no more time
    than others. `found` gets the masks of all values."""
    known: dict[tuple[Graph, tuple[int, ...]], Masks] = {}

    def run(region: Graph, ins: Masks) -> Masks:
        key = region, tuple(ins)
        if key not in known:
            masks: dict[Value, int] = {}
            known[key] = spread(region, ins, rule, masks)
            if found is not None:
                found.update({v: found.get(v, 0) | mask for v, mask in masks.items()})
        return known[key]

    def rule(node: Node, ins: Masks) -> Masks:
        if node.regions and any(ins) and (entered := enter(node, ins, run)) is not None:
            return entered[0]
        if node.primitive.name in _ELEMENTWISE_TUPLES:
            return ins
        return [joined(ins)] * len(node.outputs)

    return run, rule


def flat_forms(graph: Graph, inputs: Collection[Value]) -> set[Value]:
    """The arrays of one axis in a graph, regions not included, that hold the elements of some of
    its inputs, maybe beside others: what `jax.flatten_util.ravel_pytree` makes of them."""

    def rule(node: Node, ins: Masks) -> Masks:
        if node.regions and any(ins) and (entered := enter(node, ins, run)) is not None:
            return entered[0]
        is_layout = node.op in REARRANGES or node.op == "concatenate"
        return [joined(ins) if is_layout else 0] * len(node.outputs)

    @functools.cache
    def of_region(region: Graph, ins: tuple[int, ...]) -> Masks:
        return spread(region, list(ins), rule)

    def run(region: Graph, ins: Masks) -> Masks:
        return of_region(region, tuple(ins))

    masks: dict[Value, int] = {}
    spread(graph, of_each([value in inputs for value in graph.inputs]), rule, masks)
    return {value for value, mask in masks.items() if mask and getattr(value.aval, "ndim", 0) == 1}


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
    calls = region_calls(node)
    if not calls or any(is_reference(v) for v in node.inputs):
        return None
    branch = ins[0] if node.primitive is _jax.COND else 0  # which one is taken
    regions = {call.name: [ins[i] for i in call.operands] for call in calls}
    while True:
        outs = [run(node.regions[name], masks) for name, masks in regions.items()]
        again = outs[0][0] if node.primitive in _jax.WHILES else 0  # whether the loop goes on
        more = {
            call.name: [
                mask if i is None else mask | outs[-1][i] | again
                for mask, i in zip(regions[call.name], call.fed_back_from, strict=True)
            ]
            for call in calls
        }
        if more == regions:
            break
        regions = more
    results = [branch] * len(node.outputs)
    for call, masks in zip(calls, outs, strict=True):
        for k, mask in zip(call.results, masks, strict=True):
            if k is not None:
                results[k] |= mask
    if may_take_no_step(node):
        for mask, i in zip(regions[calls[-1].name], calls[-1].fed_back_from, strict=True):
            if i is not None:
                results[i] |= mask
    return results, regions


# --------------------------------------------------------------------------------------- liveness


def leading_to(graph: Graph, outputs: Sequence[bool], rule: Rule | None = None) -> set[Value]:
    """The values from which data flows to the chosen outputs of a graph; `rule`: which of its
    operands reach each result of a node, if not all the data."""
    live = {
        value
        for value, chosen in zip(graph.outputs, outputs, strict=True)
        if chosen and isinstance(value, Value)
    }
    rule = rule or _data_flow()[1]
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


def without_unused(graph: Graph, *, keeps_effects: bool = True) -> Graph:
    """The graph without the nodes whose results nobody uses, but for those with effects."""
    used, kept = set(graph.results), list[Node]()
    for node in reversed(graph.nodes):
        if (keeps_effects and node.effects) or not used.isdisjoint(node.outputs):
            used.update(node.operands)
            kept.append(node)
    return graph if len(kept) == len(graph.nodes) else graph.replace(nodes=kept[::-1])


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
    found = list(outputs)
    if not is_loop(node):
        return found
    *_, body = region_calls(node)
    while True:
        before, more = back(found), list(found)
        for i, k in enumerate(body.fed_back_from):
            if k is not None:
                more[k] = join(more[k], before[i])
        if more == found:
            break
        found = more
    return found
