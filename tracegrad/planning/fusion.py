"""Finds the results that XLA writes to memory, and the results that XLA fuses into their readers.

The backend decides which operations to fuse, and the compiled gradient with nothing recomputed
shows the decision: each node is traced in its own named scope, and XLA keeps the scopes of the
operations that it compiles. Without a compiled gradient, all results except views count as written.

A result is *inlined* if only its readers compute it, inside of themselves, and no buffer holds it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from tracegrad.ir import CustomGradient, Graph, Node, operations
from tracegrad.ir.running import read, run_node, run_nodes
from tracegrad.planning.compiled import written_by
from tracegrad.planning.costs import nbytes
from tracegrad.planning.hlo import Module
from tracegrad.planning.spans import alive

_SCOPE = "tracegrad.node."
_IN_SCOPE = re.compile(rf"([^/]*?){re.escape(_SCOPE)}(\d+)\b")


class Fate(NamedTuple):
    """How XLA treats the results of a node.

    Attributes:
      inlined: whether the readers compute the results themselves, and no buffer holds the results.
      beside: bytes of other values of the node, such as a derivative, that are written before the
        backward pass begins, and that the backward pass reads.
      cotangents: the bytes that the backward pass has computed and that are alive during the node's
        backward step; None if unknown: on several devices, or in a program with loops or branches.
    """

    inlined: bool = False
    beside: int = 0
    cotangents: int | None = None


Fusion = tuple[Fate, ...]  # one for each node of a graph, in order


def without_compiling(graph: Graph) -> Fusion:
    """Returns fates in which views are inlined, and all other results are written."""
    return tuple(Fate(inlined=node.op in operations.VIEWS) for node in graph.nodes)


def evaluate_in_scopes(graph: Graph, args: Sequence[Any]) -> list[Any]:
    """Runs a graph as `run_graph` does, with each node in a named scope of its own."""
    numbers = itertools.count()

    def run_in_scope(node: Node, operands: list[Any]) -> list[Any]:
        with jax.named_scope(f"{_SCOPE}{next(numbers)}"):
            return run_node(node, operands)

    return read(graph.outputs, run_nodes(graph, args, run_in_scope))


def read_fates(graph: Graph, compiled: Module, examples: int = 1, devices: int = 1) -> Fusion:
    """Returns the fate of each node, read from the compiled gradient of `evaluate_in_scopes`.

    `examples`: the number of examples that the enclosing `jax.vmap`s compute together; `devices`:
    the number of devices that may share the results.
    """
    writes = written_by(compiled)
    result_bytes = [[nbytes(v.aval) for v in node.outputs] for node in graph.nodes]
    holds: list[set[int]] = []  # for each buffer, the nodes whose results it holds
    is_back: list[bool] = []  # for each buffer, whether the backward pass writes it
    # For each buffer, the nodes that write it, forward and backward; and the nodes inside.
    writers = [_nodes_of_scopes(each.scopes) for each in writes]
    inside = [_nodes_of_scopes(each.inside)[0] for each in writes]
    for each, (forward, backward) in zip(writes, writers, strict=True):
        is_back.append(bool(backward) or (not forward and any(is_back[k] for k in each.reads)))
        size = each.size * devices // examples
        fitting = {i for i in forward if size >= min(result_bytes[i], default=0)}
        holds.append(set() if is_back[-1] else fitting)
    back = list(itertools.compress(range(len(writes)), is_back))
    kept = {k for i in back for k in writes[i].reads if not is_back[k]}
    read_back = set[int]().union(*(holds[k] for k in kept))
    sizes: dict[int, list[int]] = {}  # for each node, the bytes of its kept buffers
    for k in kept:
        if forward := writers[k][0]:
            sizes.setdefault(max(forward), []).append(writes[k].size // examples)
    kept_results = {i: sum(result_bytes[i]) if i in read_back else 0 for i in sizes}
    beside = {i: max(0, sum(size) - kept_results[i]) for i, size in sizes.items()}
    views, inlined = _find_inlined_nodes(graph, set().union(*holds), set().union(*inside))
    # Backward steps come after the buffer of the last forward node. XLA may compute gradients of
    # arguments at any time.
    ends = [(max(writers[k][0]), k) for k, b in enumerate(is_back) if not b and writers[k][0]]
    _, end = max(ends, default=(0, -1))
    for k in back:
        if k < end < writes[k].until and writes[k].reads and writers[k][1]:
            node = max(writers[k][1])
            beside[node] = beside.get(node, 0) + writes[k].size // examples
    steps = {k: writers[k][1] - views for k in back if k > end and writes[k].reads}
    compiled_ops = {each.op for each in compiled.entry.instructions.values()}
    if devices > 1 or not compiled_ops.isdisjoint({"while", "conditional"}):
        steps = {}
    live = alive([(k, writes[k].until, writes[k].size // examples) for k in steps], len(writes))
    fates = enumerate(_cotangents_of_nodes(len(graph.nodes), steps, live))
    return tuple(Fate(i in inlined, beside.get(i, 0), size) for i, size in fates)


def _cotangents_of_nodes(
    count: int, steps: Mapping[int, set[int]], live: Sequence[int]
) -> list[int | None]:
    """Returns the bytes alive in each node's backward step; `steps` maps a moment to its nodes."""
    peaks, node = dict[int, int](), count - 1
    for k, nodes in steps.items():
        node = min(node, max(nodes, default=node))
        peaks[node] = max(live[k], peaks.get(node, 0))
    # A node without a step runs inside of a later step, that of the node before it.
    peak = peaks.get(node)
    return [peak := peaks.get(i, peak) for i in range(count)]


def _find_inlined_nodes(
    graph: Graph, written: Collection[int], inside: Collection[int]
) -> tuple[set[int], set[int]]:
    """Returns the nodes that are views of arguments, and all inlined nodes: these views, and the
    nodes that occur inside of other nodes and are not written."""
    results = {graph.producers.get(value) for value in graph.results}
    # If XLA writes a view of an argument, the view is alive during the whole program, as the
    # argument is.
    arguments, views, inlined = {*graph.inputs, *graph.constants}, set[int](), set[int]()
    for i, node in enumerate(graph.nodes):
        if node.op in operations.VIEWS and arguments.issuperset(node.operands):
            arguments.update(node.outputs)
            views.add(i)
        is_open = isinstance(node, CustomGradient) or not (node.regions or node.effects)
        is_inside = i not in written and (i in inside or node.op in operations.VIEWS)
        if is_open and is_inside and node not in results:
            inlined.add(i)
    return views, views | inlined


def _nodes_of_scopes(scopes: Iterable[str]) -> tuple[set[int], set[int]]:
    """Returns the numbers of the nodes, in the forward and in the backward pass."""
    sides: tuple[set[int], set[int]] = set(), set()
    for match in filter(None, map(_IN_SCOPE.search, scopes)):
        sides["transpose(" in match[1]].add(int(match[2]))
    return sides
