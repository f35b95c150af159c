"""Cuts a list of operations into runs (of neighbouring operations), so that equal layers of a model
become equal runs, which are compiled once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from tracegrad.insight.explaining.detail import Detail
from tracegrad.insight.explaining.visits import is_called, is_entered
from tracegrad.ir import CustomGradient, Graph, Node
from tracegrad.ir.authors import is_jaxs_rule
from tracegrad.ir.program_keys import params_key, program_key, rule_key
from tracegrad.planning.costs import nbytes_anywhere
from tracegrad.rewriting.kept_zeros import keeps_zeros

_FEWEST = 8  # the fewest operations in a period
# The most operations in a run; a call of more operations is cut into runs. A program holds all the
# values of its run at once, and what it returns to be measured. So a run may have more operations
# only if its values are small.
_MOST, _MOST_SMALL = 100, 500
_SMALL = 1 << 28  # bytes of the values of a run


def runs_of(nodes: Sequence[Node], detail: Detail) -> list[Sequence[Node]]:
    """Cuts operations into runs.

    Finds the longest sequence that repeats itself with some period, and cuts it into its periods
    where the fewest bytes cross. Then does the same with the operations before and after it."""
    numbers: dict[Hashable, int] = {}
    symbols = [numbers.setdefault(_symbol(node), len(numbers)) for node in nodes]
    size = sum(nbytes_anywhere(value.aval) for node in nodes for value in node.outputs)
    most = _MOST_SMALL if detail is Detail.FEW and size <= _SMALL else _MOST
    return _by_repeats(nodes, np.array(symbols, int), most)


def is_large_call(node: Node) -> bool:
    """Whether a node calls one region with so many operations that the region is cut into runs."""
    return is_called(node) and is_entered(node) and _count(node) > _MOST


def _count(node: Node) -> int:
    """Counts the operations inside a node and the node itself, up to one more than `_MOST`."""
    count, waiting = 0, [node]
    while waiting and count <= _MOST:
        count += 1
        waiting += [n for region in waiting.pop().regions.values() for n in region.nodes]
    return count


def _symbol(node: Node) -> Hashable:
    """Returns a key that is equal for operations with equal parameters and types; for operations
    with custom rules equality is only a guess."""
    is_rule = isinstance(node, CustomGradient)
    params = node.name if is_rule else params_key(node.params)
    types = [tuple(atom.aval for atom in atoms) for atoms in (node.inputs, node.outputs)]
    return node.primitive, params, *types


def _by_repeats(nodes: Sequence[Node], symbols: Any, most: int) -> list[Sequence[Node]]:
    best = 0, 0, 0
    for period in range(_FEWEST, len(nodes) // 2 + 1):
        same = np.concatenate([[False], symbols[period:] == symbols[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])  # starts and ends of repeats, in turn
        lengths = edges[1::2] - edges[::2]
        if len(edges) and lengths.max() >= period:
            best = max(best, (int(lengths.max()), -period, -int(edges[2 * lengths.argmax()])))
    length, period, start = best[0], -best[1], -best[2]
    if not length:  # nothing repeats
        return _by_width(nodes, most)
    start += int(np.argmin(_crossing(nodes)[start : start + length % period + 1]))
    end = start + (length // period + 1) * period
    found = _by_repeats(nodes[:start], symbols[:start], most) if start else []
    for i in range(start, end, period):
        found += _by_width(nodes[i : i + period], most)
    return found + (_by_repeats(nodes[end:], symbols[end:], most) if end < len(nodes) else [])


def _by_width(nodes: Sequence[Node], most: int) -> list[Sequence[Node]]:
    """Cuts into runs of at most `most` operations, where the fewest bytes cross."""
    found, i, crossing = [], 0, _crossing(nodes)
    while len(nodes) - i > most:
        j = i + most // 3
        j += int(np.argmin(crossing[j : i + most + 1]))
        found.append(nodes[i:j])
        i = j
    return [*found, nodes[i:]]


def _crossing(nodes: Sequence[Node]) -> Any:
    """Returns, for each position between operations, the bytes that are computed before it and read
    after it."""
    made = {v: i for i, node in enumerate(nodes) for v in node.outputs}
    read = {v: i for i, node in enumerate(nodes) for v in node.operands if v in made}
    change = np.zeros(len(nodes) + 2)
    for v, last in read.items():
        size = nbytes_anywhere(v.aval)
        change[made[v] + 1] += size
        change[last + 1] -= size
    return np.cumsum(change)


def key_of(graph: Graph) -> Any:
    """Returns a key that is equal for programs with equal operations and equal derivatives.

    JAX makes new functions for a custom rule whenever it traces a call, so that the functions are
    never equal. The key has the programs that the rules trace to.
    """
    nodes = (o.node for o in graph.walk() if isinstance(o.node, CustomGradient))
    return program_key(graph.program), tuple(map(_rule_key, dict.fromkeys(nodes)))


def _rule_key(node: CustomGradient) -> Any:
    if is_jaxs_rule(node):
        return node.primal.function_source
    try:
        return rule_key(node, is_of_operation=keeps_zeros(node))
    except Exception:  # the rule cannot be traced by itself: it equals no other one
        return object()
