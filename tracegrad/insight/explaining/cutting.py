"""Cuts a list of operations into runs (of neighbouring operations), so that equal layers of a model
become equal runs, which are compiled once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from tracegrad.ir import CustomGradient, Node
from tracegrad.ir.program_keys import params_key
from tracegrad.planning.costs import nbytes_anywhere

LIMIT = 100  # the most operations in a run
_FEWEST = 8  # the fewest operations in a period


def runs_of(nodes: Sequence[Node]) -> list[Sequence[Node]]:
    """Cuts operations into runs.

    Finds the longest sequence that repeats itself with some period, and cuts it into its periods
    where the fewest bytes cross. Then does the same with the operations before and after it."""
    numbers: dict[Hashable, int] = {}
    symbols = [numbers.setdefault(_symbol(node), len(numbers)) for node in nodes]
    return _by_repeats(nodes, np.array(symbols, int))


def _symbol(node: Node) -> Hashable:
    """Returns a key that is equal for operations with equal parameters and types; for operations
    with custom rules equality is only a guess."""
    is_rule = isinstance(node, CustomGradient)
    params = node.name if is_rule else params_key(node.params)
    types = [tuple(atom.aval for atom in atoms) for atoms in (node.inputs, node.outputs)]
    return node.primitive, params, *types


def _by_repeats(nodes: Sequence[Node], symbols: Any) -> list[Sequence[Node]]:
    best = 0, 0, 0
    for period in range(_FEWEST, len(nodes) // 2 + 1):
        same = np.concatenate([[False], symbols[period:] == symbols[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])  # starts and ends of repeats, in turn
        lengths = edges[1::2] - edges[::2]
        if len(edges) and lengths.max() >= period:
            best = max(best, (int(lengths.max()), -period, -int(edges[2 * lengths.argmax()])))
    length, period, start = best[0], -best[1], -best[2]
    if not length:  # nothing repeats
        return _by_width(nodes)
    start += int(np.argmin(_crossing(nodes)[start : start + length % period + 1]))
    end = start + (length // period + 1) * period
    found = _by_repeats(nodes[:start], symbols[:start]) if start else []
    for i in range(start, end, period):
        found += _by_width(nodes[i : i + period])
    return found + (_by_repeats(nodes[end:], symbols[end:]) if end < len(nodes) else [])


def _by_width(nodes: Sequence[Node]) -> list[Sequence[Node]]:
    """Cuts into runs of at most `LIMIT` operations, where the fewest bytes cross."""
    found, i, crossing = [], 0, _crossing(nodes)
    while len(nodes) - i > LIMIT:
        j = i + LIMIT // 3
        j += int(np.argmin(crossing[j : i + LIMIT + 1]))
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
