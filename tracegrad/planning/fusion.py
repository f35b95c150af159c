"""Which results of a graph XLA writes to memory, and which it computes inside of what reads them.

What runs as one is for the backend to decide, so it is looked up in what it made of the gradient
with nothing recomputed: each node is traced in a scope of its own, which XLA keeps with what it
makes of it. Where nothing was compiled, all results but views are taken to be written.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from tracegrad._jax.compiled import written_by
from tracegrad._jax.hlo import Module
from tracegrad._jax.spans import alive
from tracegrad.ir import CustomGradient, Graph, Node, operations
from tracegrad.ir.running import read, run_node, run_nodes
from tracegrad.planning.costs import nbytes

_SCOPE = "tracegrad.node."
_IN_SCOPE = re.compile(rf"([^/]*?){re.escape(_SCOPE)}(\d+)\b")


class Fate(NamedTuple):
    """What becomes of the results of a node.

    Attributes:
      inlined: they are computed inside of all that reads them, and written nowhere.
      repeated: they are written, and something in the backward pass computes them all the same.
      beside: bytes of what else of the node is written in the forward pass and read in the backward
        pass, such as a derivative.
      cotangents: bytes of what the backward pass has made and reads, during the node's step of it;
        None where that was not seen: on several devices, and beside loops, whose results are one.
    """

    inlined: bool = False
    repeated: bool = False
    beside: int = 0
    cotangents: int | None = None


Fusion = tuple[Fate, ...]  # one for each node of a graph, in order


def without_compiling(graph: Graph) -> Fusion:
    """Views are inlined, and nothing else."""
    return tuple(Fate(inlined=node.op in operations.VIEWS) for node in graph.nodes)


def evaluate_in_scopes(graph: Graph, args: Sequence[Any]) -> list[Any]:
    """`run_graph`, each node in a scope of its own, by which `seen` knows it."""

    def in_scope(number: int, node: Node) -> Callable[[list[Any]], Sequence[Any]]:
        def run(operands: list[Any]) -> Sequence[Any]:
            with jax.named_scope(f"{_SCOPE}{number}"):
                return run_node(node, operands)

        return run

    instead = {node: in_scope(i, node) for i, node in enumerate(graph.nodes)}
    return read(graph.outputs, run_nodes(graph, args, instead=instead))


def seen(graph: Graph, compiled: Module, examples: int = 1, devices: int = 1) -> Fusion:
    """What the gradient of a program, compiled of `evaluate_in_scopes`, does with its results.

    `examples`: how many are computed at once, in a `jax.vmap` around; `devices`: over how many
    results may be split.
    """
    writes = written_by(compiled)
    own = [[nbytes(v.aval) for v in node.outputs] for node in graph.nodes]
    holds: list[set[int]] = []  # of each that is written, the nodes whose results it holds
    is_back: list[bool] = []  # and whether it is of the backward pass
    made = [_nodes(each.scopes) for each in writes]
    on_the_way = [_nodes(each.inside)[0] for each in writes]
    for each, (forward, backward) in zip(writes, made, strict=True):
        is_back.append(bool(backward) or (not forward and any(is_back[k] for k in each.reads)))
        size = each.size * devices // examples
        is_whole = {i for i in forward if size >= min(own[i], default=0)}
        holds.append(set() if is_back[-1] else is_whole)
    back = list(itertools.compress(range(len(writes)), is_back))
    kept = {k for i in back for k in writes[i].reads if not is_back[k]}
    again = set[int]()
    for i in back:
        again |= on_the_way[i].difference(made[i][1], *(holds[k] for k in writes[i].reads))
    read_back = set[int]().union(*(holds[k] for k in kept))
    sizes: dict[int, list[int]] = {}  # of what is kept of each node
    for k in kept:
        if of := made[k][0]:
            sizes.setdefault(max(of), []).append(writes[k].size // examples)
    beside = {i: max(0, sum(s) - sum(own[i]) * (i in read_back)) for i, s in sizes.items()}
    given, inlined = _inlined(graph, set().union(*holds), set().union(*on_the_way))
    again -= inlined
    # Behind what the forward pass writes of its last node; gradients of arguments come at any time.
    ends = [(max(made[k][0]), k) for k, b in enumerate(is_back) if not b and made[k][0]]
    _, end = max(ends, default=(0, -1))
    steps = {k: made[k][1] - given for k in back if k > end and writes[k].reads}
    run = {each.op for each in compiled.entry.instructions.values()}
    if devices > 1 or not run.isdisjoint({"while", "conditional"}):
        steps = {}
    live = alive([(k, writes[k].until, writes[k].size // examples) for k in steps], len(writes))
    fates = enumerate(_of_nodes(len(graph.nodes), steps, live))
    return tuple(Fate(i in inlined, i in again, beside.get(i, 0), size) for i, size in fates)


def _of_nodes(count: int, steps: Mapping[int, set[int]], live: Sequence[int]) -> list[int | None]:
    """Bytes alive in the step of each of so many nodes; `steps`: of moments, those back then."""
    most, now = dict[int, int](), count - 1
    for k, nodes in steps.items():
        now = min(now, max(nodes, default=now))
        most[now] = max(live[k], most.get(now, 0))
    there = most.get(now)  # what has no step of its own runs inside of one that follows
    return [there := most.get(i, there) for i in range(count)]


def _inlined(
    graph: Graph, written: Collection[int], inside: Collection[int]
) -> tuple[set[int], set[int]]:
    """The nodes that are views of arguments; and these, those that were seen inside of others and
    nowhere else, and other views."""
    results = {graph.producers.get(value) for value in graph.results}
    # A view of an argument is there from the beginning to the end, as that is, if XLA writes it.
    of_arguments, given, found = {*graph.inputs, *graph.constants}, set[int](), set[int]()
    for i, node in enumerate(graph.nodes):
        if node.op in operations.VIEWS and of_arguments.issuperset(node.operands):
            of_arguments.update(node.outputs)
            given.add(i)
        is_open = isinstance(node, CustomGradient) or not (node.regions or node.effects)
        is_inside = i not in written and (i in inside or node.op in operations.VIEWS)
        if is_open and is_inside and node not in results:
            found.add(i)
    return given, given | found


def _nodes(scopes: Iterable[str]) -> tuple[set[int], set[int]]:
    """The nodes of which these are, in the forward and in the backward pass."""
    sides: tuple[set[int], set[int]] = set(), set()
    for found in filter(None, map(_IN_SCOPE.search, scopes)):
        sides["transpose(" in found[1]].add(int(found[2]))
    return sides
