"""Whether parameters belong to layers in sequence, or work side by side (heads, terms of a sum)."""

from __future__ import annotations

from collections.abc import Sequence

from tracegrad import _jax
from tracegrad.insight.explaining.visits import is_called
from tracegrad.ir import Graph, Node, operations
from tracegrad.ir.dependence import Masks, joined, spread

# Operations that join side-by-side branches: no operand is applied to another one.
_SIDE_BY_SIDE = operations.ADDITIVE.keys() | {"select_n", "max", "min"}
_NO_WORK = operations.VIEWS | _SIDE_BY_SIDE


def are_layers(graph: Graph, inputs: Sequence[int]) -> bool:
    """Whether each of some inputs is a layer after the one before it.

    Input b is a layer after input a if b multiplies (or otherwise enters an operation with) a value
    that depends on a, or if b itself, as a bias, is added to a value computed from a. Experts,
    heads and terms of a sum are not in sequence: values computed from both are added. The gates of
    one cell depend on each other only through the step before.
    """
    count = len(inputs)
    every = (1 << count) - 1
    behind: set[tuple[int, int]] = set()

    def rule(node: Node, ins: Masks) -> Masks:
        """In the mask of a value, bit k is set if the value holds input k itself (reshaped, or in a
        sum), and bit ``count + k`` is set if other operations compute the value from input k."""
        if not any(ins):
            return [0] * len(node.outputs)
        if is_called(node) or node.primitive is _jax.SCAN:
            (region,) = node.regions.values()
            return spread(region, ins, rule)
        if node.primitive is _jax.COND:
            branches = [spread(region, ins[1:], rule) for region in node.regions.values()]
            return [joined(masks) for masks in zip(*branches, strict=True)]
        note_layers(node, ins)
        if node.op == "optimization_barrier":
            return ins
        mask = joined(ins)
        if node.op not in _NO_WORK:
            mask = (mask & every | mask >> count) << count
        return [mask] * len(node.outputs)

    def note_layers(node: Node, ins: Masks) -> None:
        for k, mask in enumerate(ins):
            members = mask & every | mask >> count
            if members.bit_count() != 1:
                continue
            before = joined([*ins[:k], *ins[k + 1 :]])
            if node.op not in _SIDE_BY_SIDE:
                before = before & every | before >> count
            else:
                before = before >> count if mask & every else 0
            later = members.bit_length() - 1
            behind.update((i, later) for i in range(count) if before >> i & 1)

    given = [0] * len(graph.inputs)
    for number, i in enumerate(inputs):
        given[i] |= 1 << number
    spread(graph, given, rule)
    return all((i, i + 1) in behind for i in range(count - 1))
