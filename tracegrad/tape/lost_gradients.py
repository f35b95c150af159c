"""Which gradients a rule loses on a tape: those of watched arrays that its function closes over.

A custom gradient returns gradients of arguments. TensorFlow gives what a function closes over none,
and so does a tape; where that takes a part of a gradient away, the tape says so.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.ir import CustomGradient, Node, Source, Value
from tracegrad.ir.dependence import Masks, joined, of_each, spread
from tracegrad.ir.importer import lone_node
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.lowering.closed_over import depends_on
from tracegrad.tape.block import graph_of
from tracegrad.tape.computations import Computation
from tracegrad.tape.keys import PROGRAMS, closed_over_by, closes_over_arrays
from tracegrad.tape.record import LostGradient, Record, lost_gradient_text
from tracegrad.tape.rules_on_values import Rule

# --------------------------------------------------------------------------- rules on values


def lost_around(
    record: Record,
    begun: tuple[int, int],
    rule: Rule,
    operands: Sequence[Any],
    computed: Sequence[Any],
    info: Any,
) -> list[LostGradient]:
    """The followed arrays that a function with a rule on values has closed over, without results.

    Args:
      record: one that has recorded what the function did.
      begun: how many steps and lost gradients the record had when the function was called.
      operands: the arrays to which the rule gives gradients.
      computed: the arrays that the function has returned.
      info: JAX's source info of the call.
    """
    first, before = begun
    ends = [record.slots[id(each)] for each in computed if id(each) in record.tracked]
    if not ends:
        return []
    made, used = set[int](), dict[int, None]()
    for step in record.steps[first:]:
        if step.computation is not None:
            used.update(dict.fromkeys(slot for slot in step.args if slot not in made))
            made.update(step.results)
    used.update(dict.fromkeys(slot for slot in ends if slot not in made))
    given, arrays = set(map(id, operands)), record.arrays
    followed = [s for s in used if id(arrays[s]) in record.tracked and id(arrays[s]) not in given]
    inside = first, len(record.steps), tuple(ends)

    def text(array: Any) -> str:
        return lost_gradient_text(rule.describe(array), info)

    inner = record.lost[before:]  # by functions that this one has called
    own = [LostGradient(s, (), functools.partial(text, arrays[s]), inside) for s in followed]
    return [*inner, *own]


# --------------------------------------------------------------------------- rules in programs


def lose_in(
    records: Sequence[Record],
    computation: Computation,
    operands: Sequence[Any],
    results: Sequence[Any],
) -> None:
    """Tells records which operands of an operation that has run functions in it close over."""
    if not (
        any(map(closes_over_arrays, computation.programs))
        or closed_over_by(computation.primitive, computation.params)
    ):
        return
    types, of_results = (tuple(map(jax.typeof, arrays)) for arrays in (operands, results))
    key = lose_in, computation.keys[1], types
    found: Sequence[tuple[int, tuple[str, str], tuple[int, ...]]] | None = PROGRAMS.get(key)
    if found is None:
        found = PROGRAMS.put(key, _lost_operands(computation, types, of_results))
    info = _jax.current_source_info() if found else None
    for operand, what, places in found:
        for record in records:
            record.lose(operands[operand], [results[i] for i in places], what, info)


def _lost_operands(
    computation: Computation, types: Sequence[Any], results: Sequence[Any]
) -> list[tuple[int, tuple[str, str], tuple[int, ...]]]:
    """Each operand of an operation that a function with a rule in it closes over: its position,
    what the user calls it, and the results that are connected to a result of that function."""
    source = Source(None, None)
    node = lone_node(computation.primitive, computation.params, types, source, results)
    walk = _ClosedOver(len(types))
    outs = walk.rule(node, of_each(map(_jax.has_gradient, types)))
    return [
        (operand, what, places)
        for (operand, what), bit in walk.found.items()
        if (places := tuple([i for i, mask in enumerate(outs) if mask & bit]))
    ]


class _ClosedOver(Walk):
    """A walk whose masks have a bit for each operand of an operation, and behind these one for each
    that a function with a rule closes over, beginning at the results of the function."""

    def __init__(self, count: int):
        self._count = count
        self.found: dict[tuple[int, tuple[str, str]], int] = {}

    def rule(self, node: Node, ins: Masks) -> Masks:
        outs = super().rule(node, ins)
        for position, what in closed_over_by(node.primitive, node.params):
            assert isinstance(node, CustomGradient)
            operands = [i for i in range(self._count) if ins[position] >> i & 1]
            if operands and depends_on(node.primal, position):
                for i in operands:
                    bit = self.found.setdefault((i, what), 1 << self._count + len(self.found))
                    outs = [m | bit if v.has_gradient else m for m, v in zip(outs, node.outputs)]
        return outs


# --------------------------------------------------------------------------- when it is asked


def warn_of_lost(record: Record, sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Warns, at the user's line, of each lost gradient that is a part of one that is asked for."""
    if not record.lost:
        return
    ends = [
        tuple([record.slots[id(each)] for each in arrays if id(each) in record.slots])
        for arrays in (sources, targets)
    ]
    key = "lost", *ends, tuple([(lost.array, lost.results, lost.inside) for lost in record.lost])
    known: Sequence[int] | None = record.step.programs.get(key)
    if known is None:
        known = record.step.programs[key] = _missed(record, *ends)
    for text in dict.fromkeys(record.lost[i].text() for i in known):
        warn_where_called(text, UserWarning)


def _missed(record: Record, sources: Sequence[int], targets: Sequence[int]) -> list[int]:
    """Which lost gradients lie on a way from a source to a target."""
    graph, values, _ = graph_of(record.operations(), record.types(), as_called=True)
    walk = Walk()
    starts = dict.fromkeys((values[slot] for slot in sources), 1)
    for i, lost in enumerate(record.lost, 1):
        for slot in lost.results:
            starts[values[slot]] = starts.get(values[slot], 0) | 1 << i

    def rule(node: Node, ins: Masks) -> Masks:
        pairs = zip(node.outputs, walk.rule(node, ins), strict=True)
        return [mask | starts.get(value, 0) for value, mask in pairs]

    masks: dict[Value, int] = {}
    spread(graph, [starts.get(value, 0) for value in graph.inputs], rule, masks)
    arrived = joined(masks[values[slot]] for slot in targets)
    return [
        i
        for i, lost in enumerate(record.lost)
        if masks[values[lost.array]] & 1
        and arrived >> i + 1 & 1
        and _is_connected(record, lost, graph.nodes, values, walk)
    ]


def _is_connected(
    record: Record,
    lost: LostGradient,
    nodes: Sequence[Node],
    values: Mapping[int, Value],
    walk: Walk,
) -> bool:
    """Whether what a function with a rule on values has computed is connected to the array that it
    closes over."""
    if lost.inside is None:
        return True
    first, last, ends = lost.inside
    before, until = (
        sum(step.computation is not None for step in record.steps[:end]) for end in (first, last)
    )
    masks = {values[lost.array]: 1}
    for node in nodes[before:until]:
        ins = [masks.get(v, 0) if isinstance(v, Value) else 0 for v in node.inputs]
        masks.update(zip(node.outputs, walk.rule(node, ins), strict=True))
    return any(masks.get(values[slot], 0) for slot in ends)
