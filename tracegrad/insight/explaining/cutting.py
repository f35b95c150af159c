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
from tracegrad.planning.costs import nbytes
from tracegrad.rewriting.kept_zeros import keeps_zeros

_FEWEST = 8  # the fewest operations in a period
# The most operations that a run returns all values of; a call of more operations is cut into runs.
_MOST = 100
_SMALL = 1 << 28  # bytes of the values of a run, which its program may hold at once


def runs_of(nodes: Sequence[Node], detail: Detail) -> list[Sequence[Node]]:
    """Cuts operations into runs.

    Finds the longest sequence that repeats itself with some period, and cuts it into its periods
    where the fewest bytes cross. Then does the same with the operations before and after it. All
    runs but the last are compiled twice: to go forward, and to come back. So operations that fit
    into one run are cut only if that saves half of them."""
    numbers: dict[Hashable, int] = {}
    symbols = [numbers.setdefault(_symbol(node), len(numbers)) for node in nodes]
    sizes = [sum(nbytes(v.aval) for v in node.outputs) / _SMALL for node in nodes]
    least = 0 if detail is Detail.FEW else 1 / _MOST
    return _by_repeats(nodes, np.array(symbols, int), np.maximum(sizes, least))


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


def _by_repeats(nodes: Sequence[Node], symbols: Any, weights: Any) -> list[Sequence[Node]]:
    """Cuts operations into runs; a run has a weight of at most 1, or is one operation."""
    best = 0, 0, 0
    for period in range(_FEWEST, len(nodes) // 2 + 1):
        same = np.concatenate([[False], symbols[period:] == symbols[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])  # starts and ends of repeats, in turn
        lengths = edges[1::2] - edges[::2]
        if len(edges) and lengths.max() >= period:
            best = max(best, (int(lengths.max()), -period, -int(edges[2 * lengths.argmax()])))
    length, period, start = best[0], -best[1], -best[2]
    if not length or (weights.sum() <= 1 and 2 * length < len(nodes)):
        return _by_width(nodes, weights)
    start += int(np.argmin(_crossing(nodes)[start : start + length % period + 1]))
    end = start + (length // period + 1) * period
    found = _by_repeats(nodes[:start], symbols[:start], weights[:start]) if start else []
    for i in range(start, end, period):
        found += _by_width(nodes[i : i + period], weights[i : i + period])
    if end < len(nodes):
        found += _by_repeats(nodes[end:], symbols[end:], weights[end:])
    return found


def _by_width(nodes: Sequence[Node], weights: Any) -> list[Sequence[Node]]:
    """Cuts into runs where the fewest bytes cross."""
    found, i, crossing = [], 0, _crossing(nodes)
    until = np.concatenate([[0], np.cumsum(weights)])
    while until[-1] - until[i] > 1:
        first, end = np.searchsorted(until, until[i] + np.array([1 / 3, 1]), "right")
        first = max(int(first), i + 1)
        j = first + int(np.argmin(crossing[first : max(int(end), first + 1)]))
        found.append(nodes[i:j])
        i = j
    return [*found, nodes[i:]] if i < len(nodes) else found


def _crossing(nodes: Sequence[Node]) -> Any:
    """Returns, for each position between operations, the bytes that are computed before it and read
    after it."""
    made = {v: i for i, node in enumerate(nodes) for v in node.outputs}
    read = {v: i for i, node in enumerate(nodes) for v in node.operands if v in made}
    change = np.zeros(len(nodes) + 2)
    for v, last in read.items():
        size = nbytes(v.aval)
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
