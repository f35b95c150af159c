"""Rewrites a program as XLA treats it: inlines jitted calls, so that a plan can cut inside of them,
and merges equal cheap operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import numpy as np

from tracegrad import _jax
from tracegrad.ir import Apply, Atom, Graph, Literal, Node, Value, operations
from tracegrad.ir.nodes import renamed
from tracegrad.ir.occurrence import source_after_inlining

# Barriers exist to prevent merging. If a user computes a larger operation twice, this is on
# purpose.
_MERGED = (operations.VIEWS | operations.BY_ELEMENT | operations.REDUCTIONS) - {
    "optimization_barrier"
}


def flatten(graph: Graph) -> Graph:
    """Inlines jitted calls, at every depth, and computes no element-wise operation or reduction
    twice (such as a mean that a variance computes again).

    Calls with their own settings (shardings, layouts, donated operands) are not inlined. Loops,
    branches, custom gradients and `jax.checkpoint` regions are not changed.
    """
    return _merge_equal_nodes(_inline_calls(graph))


def _is_plain_call(node: Node) -> bool:
    if node.primitive is not _jax.JIT or node.effects:
        return False
    return not any(node.params["donated_invars"]) and _jax.is_plain_jit(node.params)


def _inline_calls(graph: Graph) -> Graph:
    if not any(map(_is_plain_call, graph.nodes)):
        return graph
    names: dict[Value, Atom] = {}
    constants = dict(graph.constants)
    nodes = []
    for node in graph.nodes:
        node = node.with_renamed_operands(names)
        if not _is_plain_call(node):
            nodes.append(node)
            continue
        region = _inline_calls(node.region("jaxpr"))
        inner: dict[Value, Atom] = dict(zip(region.inputs, node.inputs, strict=True))
        for value, array in region.constants.items():
            inner[value] = own = Value(value.aval)
            constants[own] = array
        made = {value for each in region.nodes for value in each.outputs}
        for old, new in zip(node.outputs, region.outputs, strict=True):
            if isinstance(new, Value) and new in made and new not in inner:
                inner[new] = old
            else:
                (names[old],) = renamed([new], inner)
        inner |= {value: Value(value.aval) for value in made if value not in inner}
        for each in region.nodes:
            source = source_after_inlining(node, each).info
            equation = each.with_renamed_values(inner).equation.replace(source_info=source)
            nodes.append(dataclasses.replace(each, equation=equation, key=equation))
    outputs = renamed(graph.outputs, names)
    return graph.replace(nodes=nodes, outputs=outputs, constants=constants)


def _merge_equal_nodes(graph: Graph) -> Graph:
    numbers = _Numbers()
    first: dict[Hashable, Value] = {}
    names: dict[Value, Atom] = {}
    nodes = []
    for node in graph.nodes:
        node = node.with_renamed_operands(names)
        if isinstance(node, Apply) and node.op in _MERGED and len(node.outputs) == 1:
            (result,) = node.outputs
            same = first.setdefault((numbers.of(node), result.aval), result)
            if same is not result:
                names[result] = same
                continue
        nodes.append(node)
    return graph.replace(nodes=nodes, outputs=renamed(graph.outputs, names)) if names else graph


class _Numbers:
    """Numbers the results; equal computations have equal numbers (value numbering).

    An element-wise operation on broadcasts gets the number of the broadcast of the operation: a
    mean may be divided before it is broadcast or, with ``keepdims``, after it.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[Value, int] = {}
        self._broadcasts: dict[Hashable, tuple[Hashable, Hashable]] = {}  # parameters, and operand

    def of(self, node: Node) -> int:
        operands = [self._value_key(v) for v in node.inputs]
        how = node.primitive, *sorted(node.params.items()), node.source.settings
        alike = {
            self._broadcasts[name][0] if name in self._broadcasts else None
            for name, v in zip(operands, node.inputs, strict=True)
            if isinstance(v, Value)
        }
        broadcast: tuple[Hashable, Hashable] | None = None
        if node.op == "broadcast_in_dim" and len(operands) == 1:
            broadcast = how, operands[0]
        elif node.op in operations.BY_ELEMENT and len(alike) == 1 and None not in alike:
            narrow = (self._broadcasts[v][1] if v in self._broadcasts else v for v in operands)
            broadcast = alike.pop(), self._expression_number(how, *narrow)
        number = self._expression_number(*(broadcast or (how, *operands)))
        if broadcast:
            self._broadcasts[number] = broadcast
        self._known[node.outputs[0]] = number
        return number

    def _value_key(self, operand: Atom) -> Hashable:
        if isinstance(operand, Literal):  # by its bits: many print alike, and 0.0 equals -0.0
            return np.asarray(operand.val).tobytes(), operand.aval
        return self._known.get(operand, operand)

    def _expression_number(self, *computed: Hashable) -> int:
        return self._numbers.setdefault(computed, len(self._numbers))
