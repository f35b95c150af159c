"""The same program as XLA takes it: with its jitted calls written out, so that a plan can cut
inside them, and what it computes twice computed once."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from tracegrad import _jax
from tracegrad.ir import Apply, Call, Graph, Literal, Node, Value, operations
from tracegrad.lowering import has_jit_settings

# Barriers are there lest it be done, and whoever computes anything larger twice means it.
_MERGED = (operations.VIEWS | operations.BY_ELEMENT | operations.REDUCTIONS) - {
    "optimization_barrier"
}


def flatten(graph: Graph) -> Graph:
    """A copy of a graph whose calls of jitted functions are their nodes, at every depth, and in
    which nothing by element and no reduction is computed twice, such as a mean by itself and for
    the variance.

    Calls with settings of their own (shardings, layouts, donated operands) stay as they are, and
    so do loops, branches, custom gradients and what is recomputed already.
    """
    flat = graph.copy()
    pending = [node for node in flat.nodes if _is_plain_call(node)]
    while pending:
        node = pending.pop()
        region = node.regions["jaxpr"]
        at = flat.nodes.index(node)
        flat.replace(node, region)
        pending += [n for n in flat.nodes[at : at + len(region.nodes)] if _is_plain_call(n)]
    _merge(flat)
    return flat


def _is_plain_call(node: Node) -> bool:
    if not isinstance(node, Call) or node.primitive is not _jax.JIT or node.effects:
        return False
    return node.is_new or not has_jit_settings(node)


def _merge(graph: Graph) -> None:
    """Merges nodes that compute the same."""
    numbers = _Numbers()
    first: dict[Hashable, Value] = {}
    merged: dict[Value | Literal, Value] = {}
    gone: list[Node] = []
    for node in graph.nodes:
        if not merged.keys().isdisjoint(node.inputs):
            graph.set_inputs(node, [merged.get(v, v) for v in node.inputs])
        if isinstance(node, Apply) and node.op in _MERGED and len(node.outputs) == 1:
            (result,) = node.outputs
            same = first.setdefault((numbers.of(node), result.aval), result)
            if same is not result:
                merged[result] = same
                gone.append(node)
    if gone:
        graph.set_outputs([merged.get(v, v) for v in graph.outputs])
        graph.erase(*gone)


class _Numbers:
    """A number for each result, equal for those that are computed alike (value numbering).

    What is by element of broadcasts is the broadcast of that: a mean is divided before it is
    broadcast, and with ``keepdims`` behind it.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[Value, int] = {}
        self._broadcasts: dict[Hashable, tuple[Hashable, Hashable]] = {}  # how, and of what

    def of(self, node: Node) -> int:
        operands = [self._name(v) for v in node.inputs]
        how = node.primitive, *sorted(node.params.items()), node.source and node.source.settings
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
            broadcast = alike.pop(), self._number(how, *narrow)
        number = self._number(*(broadcast or (how, *operands)))
        if broadcast:
            self._broadcasts[number] = broadcast
        self._known[node.outputs[0]] = number
        return number

    def _name(self, operand: Value | Literal) -> Hashable:
        if isinstance(operand, Literal):  # by its bits: many print alike, and 0.0 equals -0.0
            return np.asarray(operand.value).tobytes(), operand.aval
        return self._known.get(operand, operand)

    def _number(self, *computed: Hashable) -> int:
        return self._numbers.setdefault(computed, len(self._numbers))
