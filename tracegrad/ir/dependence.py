"""Dependences in a program: for every result, the inputs that it depends on.

A set of inputs is a bit mask: bit i for the i-th input. `spread` propagates masks forward through a
graph. Its caller gives the rule that propagates masks through a node. So the same walk finds the
inputs on which an output depends, or the inputs that get a gradient from the output.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TypeVar

from tracegrad import _jax
from tracegrad.ir.graph import Graph
from tracegrad.ir.inlined import is_loop, may_take_no_step, region_calls
from tracegrad.ir.nodes import Atom, CustomGradient, Node, StopGradient, Value, is_reference

T = TypeVar("T")
Masks = list[int]
Run = Callable[[Graph, Masks], Masks]  # a region's input masks -> its output masks
Rule = Callable[[Node, Masks], Masks]  # a node's input masks -> its output masks

# Each result depends only on the operand at the same position.
_ELEMENTWISE_TUPLES = frozenset({"optimization_barrier"})


def dependence(graph: Graph, *, past_stops: bool = True) -> Masks:
    """Returns for every output of a graph the inputs on which it depends through any data flow.
    `past_stops` says whether data flows through stopped gradients. Without `past_stops`, a custom
    gradient counts as one operation, each of whose results depends on every operand: its rule may
    pass a gradient where its function stops it.

    A loop's masks are the fixed point over any number of iterations (also no iteration, unless a
    scan has a positive length); a conditional's masks are the union over all branches and the
    predicate. If only JAX knows how a node runs its regions, every result depends on every operand.
    """
    run, _ = _make_data_flow(past_stops=past_stops)
    return run(graph, of_each([True] * len(graph.inputs)))


def data_flow(node: Node, ins: Masks) -> Masks:
    """Propagates masks through a node: each result depends on all operands that it is made from."""
    return _make_data_flow()[1](node, ins)


def spread_below(graph: Graph, inputs: Masks) -> dict[Value, int]:
    """Returns the mask of every value in a graph and in the regions below it, by plain data flow.
    In a region, a mask is the union over all calls of the region."""
    masks: dict[Value, int] = {}
    _make_data_flow(masks)[0](graph, inputs)
    return masks


def _operation_rule(node: Node, ins: Masks) -> Masks:
    """Propagates masks through a node as one operation, without entering its regions."""
    if node.primitive.name in _ELEMENTWISE_TUPLES:
        return ins
    return [joined(ins)] * len(node.outputs)


def _make_data_flow(
    record: dict[Value, int] | None = None, past_stops: bool = True
) -> tuple[Run, Rule]:
    """Returns functions that propagate masks through graphs and through nodes, by data flow. They
    cache the masks of regions, so that nested shared regions take no more time than other regions.
    `record` gets the masks of all values; `past_stops` is as for `dependence`."""
    cache: dict[tuple[Graph, tuple[int, ...]], Masks] = {}

    def run(region: Graph, ins: Masks) -> Masks:
        key = region, tuple(ins)
        if key not in cache:
            masks: dict[Value, int] = {}
            cache[key] = spread(region, ins, rule, masks)
            if record is not None:
                record.update({v: record.get(v, 0) | mask for v, mask in masks.items()})
        return cache[key]

    def rule(node: Node, ins: Masks) -> Masks:
        if not past_stops and isinstance(node, StopGradient):
            return [0]
        enters = past_stops or not isinstance(node, CustomGradient)
        if enters and node.regions and any(ins) and (entered := enter(node, ins, run)) is not None:
            return entered[0]
        return _operation_rule(node, ins)

    return run, rule


def node_dependence(node: Node) -> Masks:
    """Returns for every result of a node the operands, by position, on which it depends."""
    return data_flow(node, of_each([True] * len(node.inputs)))


def of_each(chosen: Iterable[bool]) -> Masks:
    """Returns for each chosen input a mask with only the input's own bit, and 0 for the others."""
    return [1 << i if is_chosen else 0 for i, is_chosen in enumerate(chosen)]


def spread(
    graph: Graph, inputs: Masks, rule: Rule, record: MutableMapping[Value, int] | None = None
) -> Masks:
    """Propagates masks from the inputs of a graph to its outputs; `record` gets the mask of every
    value."""
    masks: MutableMapping[Value, int] = {} if record is None else record
    masks.update(zip(graph.inputs, inputs, strict=True))
    for node in graph.nodes:
        # No function call for each operand: this code runs for every node of a program.
        ins = [masks.get(v, 0) if isinstance(v, Value) else 0 for v in node.inputs]
        outs = rule(node, ins)
        masks.update(zip(node.outputs, outs, strict=True))
        for value in node.inputs:
            if isinstance(value, Value) and is_reference(value):
                # The node may have written to this Ref.
                masks[value] = joined(ins)
    return [mask_of(value, masks) for value in graph.outputs]


def joined(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)


def mask_of(value: Atom, masks: Mapping[Value, int]) -> int:
    """Returns the mask of a value; 0 for a constant or literal."""
    return masks.get(value, 0) if isinstance(value, Value) else 0


def enter(node: Node, ins: Masks, run: Run) -> tuple[Masks, dict[str, Masks]] | None:
    """Propagates masks through the regions of a node, for a loop to the fixed point.

    Returns the masks of the results, and for each region the masks of its inputs. Returns None if
    the node has no regions, has a Ref among its operands, or runs its regions in a way that only
    JAX knows.
    """
    calls = region_calls(node)
    if not calls or any(is_reference(v) for v in node.inputs):
        return None
    branch = ins[0] if node.primitive is _jax.COND else 0  # the index of the branch taken
    regions = {call.name: [ins[i] for i in call.operands] for call in calls}
    while True:
        outs = [run(node.regions[name], masks) for name, masks in regions.items()]
        condition = outs[0][0] if node.primitive in _jax.WHILES else 0  # whether the loop goes on
        more = {
            call.name: [
                mask if i is None else mask | outs[-1][i] | condition
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
    """Returns the values on which the chosen outputs of a graph depend. `rule` says on which
    operands each result of a node depends; the default is plain data flow."""
    live = {
        value
        for value, chosen in zip(graph.outputs, outputs, strict=True)
        if chosen and isinstance(value, Value)
    }
    rule = rule or _make_data_flow()[1]
    for node in reversed(graph.nodes):
        if any(is_reference(v) and v in live for v in node.inputs):  # the node may write to a Ref
            live |= set(node.operands)
        elif not live.isdisjoint(node.outputs):
            masks = rule(node, of_each([True] * len(node.inputs)))
            mask = joined(mask for v, mask in zip(node.outputs, masks, strict=True) if v in live)
            live |= {v for i, v in enumerate(node.inputs) if isinstance(v, Value) and mask >> i & 1}
    return live


def without_unused(graph: Graph, *, keeps_effects: bool = True) -> Graph:
    """Drops the nodes whose results no output depends on; if `keeps_effects`, keeps nodes with
    effects and everything on which they depend."""
    used, kept = set(graph.results), list[Node]()
    for node in reversed(graph.nodes):
        if (keeps_effects and node.effects) or not used.isdisjoint(node.outputs):
            used.update(node.operands)
            kept.append(node)
    return graph if len(kept) == len(graph.nodes) else graph.replace(nodes=kept[::-1])


def region_outputs_leading_to(node: Node, name: str, outputs: Sequence[bool]) -> list[bool]:
    """Returns for each output of a region whether a chosen result of the node depends on it."""
    region = node.regions[name]
    if node.primitive in _jax.WHILES:
        return [True] * len(region.outputs)  # each may decide when the loop ends

    def back(chosen: list[bool]) -> list[bool]:
        live = leading_to(region, chosen)
        return [value in live for value in region.inputs]

    return back_around(node, outputs, back, operator.or_)


def back_around(
    node: Node,
    outputs: Sequence[T],
    back: Callable[[list[T]], Sequence[T]],
    join: Callable[[T, T], T],
) -> list[T]:
    """Propagates information backwards to the outputs of a loop's body, to the fixed point: from
    the users of the loop's results (`outputs`), and from the following iterations
    (``back(outputs)`` propagates information through the body, to its inputs). `join` combines
    both. If the node is not a loop, returns `outputs`."""
    at_outputs = list(outputs)
    if not is_loop(node):
        return at_outputs
    *_, body = region_calls(node)
    while True:
        at_inputs, more = back(at_outputs), list(at_outputs)
        for i, k in enumerate(body.fed_back_from):
            if k is not None:
                more[k] = join(more[k], at_inputs[i])
        if more == at_outputs:
            return at_outputs
        at_outputs = more
