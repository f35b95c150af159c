"""Groups the nodes of a graph by named scopes or, if few nodes have a scope, by function calls.

Plain functions have no scopes. The source lines of their operations tell which function the
operations belong to, and where it was called.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from tracegrad.ir import Graph, Occurrence, scopes
from tracegrad.ir.occurrence import Origin, is_user_file

Part = tuple[str, ...]  # the names of the parts around a node, from the outside in


def parts_of_nodes(graph: Graph) -> tuple[list[Part], bool]:
    """Returns the parts of a graph that each node lies in, and whether these are named scopes.

    The parts are named scopes if at least half of the nodes have a scope. Otherwise they are calls,
    ``Block (model.py:12)``, and inside of the calls any scopes. If a graph holds several passes of
    a derivative, the pass is the outermost part.
    """
    stacks = [scopes.around(node) for node in graph.nodes]
    names = [scopes.scopes(stack) for stack in stacks]
    passes = [_pass(scopes.transformations(stack)) for stack in stacks]
    if len(set(passes)) == 1:
        passes = [()] * len(passes)
    are_scopes = 2 * sum(map(bool, names)) >= max(1, len(names))
    if not are_scopes:
        passes = _calls([Occurrence((), node) for node in graph.nodes], passes)
    return [(*outer, *inner) for outer, inner in zip(passes, names, strict=True)], are_scopes


def _pass(transformations: Part) -> Part:
    """Returns the pass of a derivative that an operation belongs to, by its transformations."""
    if "transpose" in transformations:
        return ("transpose(jvp())",)
    return ("jvp()",) if "jvp" in transformations else ()


def _calls(nodes: Sequence[Occurrence], passes: Sequence[Part]) -> list[Part]:
    """Returns for each node its pass, then the function calls that lead to the node.

    The functions are the user's own and the layers of libraries (functions named ``__call__``),
    without those that all nodes have in common. Calls in a Python loop have the same lines: if a
    node has the lines of the first node in a call, another call of the same function begins.
    """
    stacks = [_functions_called(node.lines) for node in nodes]
    every = zip(*stacks, strict=False)
    shared = len(list(itertools.takewhile(lambda names: len(set(names)) == 1, every)))
    found: list[Part] = []
    open_calls: list[tuple[str, str, object]] = []  # name, numbered name, first node
    counts: list[Counter[str]] = [Counter()]  # by depth: the number of calls with each name
    for node, way, stack in zip(nodes, passes, stacks, strict=True):
        names, first = (*way, *stack[shared:]), (node.node.op, node.lines)
        pairs = zip(open_calls, names, strict=False)
        kept = len(list(itertools.takewhile(lambda pair: pair[0][0] == pair[1], pairs)))
        again = [depth for depth in range(len(way), kept) if open_calls[depth][2] == first]
        del open_calls[again[-1] if again else kept :]
        for depth in range(len(open_calls), len(names)):
            name = names[depth]
            counts[depth + 1 :] = [Counter()]
            counts[depth][name] += 1
            number = counts[depth][name]
            open_calls.append((name, name if number == 1 else f"{name} · {number}", first))
        found.append(tuple(numbered for _, numbered, _ in open_calls))
    return found


def _functions_called(lines: Sequence[Origin]) -> Part:
    """Returns the calls ``Block (model.py:12)`` that lead to an operation, the outermost first."""
    shown = [
        line
        for line in lines
        if is_user_file(line.file) or line.function.rpartition(".")[2] == "__call__"
    ]
    return tuple(
        f"{_name(called.function)} ({caller.place})" for caller, called in itertools.pairwise(shown)
    )


def _name(function: str) -> str:
    """``loss.<locals>.body`` → ``body``; ``Block.__call__`` → ``Block``."""
    return function.rpartition("<locals>.")[2].removesuffix(".__call__")
