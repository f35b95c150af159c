"""The parts of a program that a reader knows: its named scopes or, where few are named, calls.

Models of flax.nnx and plain functions have no scopes; the lines that their operations come from
tell the same: in which layer, called where.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence

from tracegrad.ir import Graph, Occurrence
from tracegrad.ir.occurrence import Origin, is_user_file

Part = tuple[str, ...]  # the names of the parts around a node, from the outside in


def parts_of(graph: Graph) -> tuple[list[Part], bool]:
    """For each node of a graph the parts that it lies in, within the graph.

    Returns them, and whether they are named scopes. They are if at least half of the nodes have
    one. Else they are calls, ``Block (model.py:12)``, under what JAX's transformations leave
    (``transpose(jvp())``: a backward pass) and around what scopes there are.
    """
    nodes = [Occurrence((), node) for node in graph.nodes]
    scopes = [scope_parts(node.scope) for node in nodes]
    split = [_without_transformations(part) for part in scopes]
    if 2 * sum(1 for _, names in split if names) >= max(1, len(nodes)):
        return scopes, True
    return _calls(nodes, split), False


def _without_transformations(scopes: Part) -> tuple[Part, Part]:
    """The pass of a derivative that scopes tell of, and the names in them.

    >>> _without_transformations(("model", "transpose(jvp(block/dense))", "vmap(jvp())"))
    (('transpose(jvp())',), ('model', 'block', 'dense'))
    """
    stack = "/".join(scopes)
    passes: Part = ("jvp()",) if "jvp(" in stack else ()
    if "transpose(" in stack:
        passes = ("transpose(jvp())",)
    names: list[str] = []
    for scope in scopes:
        match = re.fullmatch(r"(?:\w+\()+(.*?)\)+", scope)
        names += [name for name in (match[1] if match else scope).split("/") if name]
    return passes, tuple(names)


def scope_parts(stack: str) -> Part:
    """The scopes of a stack from the outside in; a transformation, ``jvp(a/b)``, is one of them.

    >>> scope_parts("model/transpose(jvp(encoder/block))/dense")
    ('model', 'transpose(jvp(encoder/block))', 'dense')
    """
    parts = [""]
    depth = 0
    for character in stack:
        depth += (character == "(") - (character == ")")
        if character == "/" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(part for part in parts if part)


def _calls(nodes: Sequence[Occurrence], scopes: Sequence[tuple[Part, Part]]) -> list[Part]:
    """For each node of a graph the functions that were called on the way to it, and where from.

    The user's own, and of libraries the layers (what is called ``__call__``); without those that
    all nodes have in common. The calls of a loop have the same lines: where a node has all the
    lines of the first in a call, another call of that function begins.
    """
    stacks = [_functions_called(node.lines) for node in nodes]
    shared = 0
    while stacks and all(
        len(stack) > shared and stack[shared] == stacks[0][shared] for stack in stacks
    ):
        shared += 1
    found: list[Part] = []
    calls: list[tuple[str, str, object]] = []  # those that are open: name, its number, first node
    counts: list[Counter[str]] = [Counter()]  # by depth: how often each was opened there
    for node, (passed, inside), stack in zip(nodes, scopes, stacks, strict=True):
        names = passed + stack[shared:] + inside
        called = range(len(passed), len(names) - len(inside))  # where calls stand among the names
        first = node.node.op, node.lines
        kept = 0
        while kept < min(len(calls), len(names)) and calls[kept][0] == names[kept]:
            kept += 1
        again = [depth for depth in called if depth < kept and calls[depth][2] == first]
        del calls[again[-1] if again else kept :]
        for depth in range(len(calls), len(names)):
            name = names[depth]
            del counts[depth + 1 :]
            counts[depth][name] += 1
            number = counts[depth][name] if depth in called else 1
            calls.append((name, name if number == 1 else f"{name} · {number}", first))
            counts.append(Counter())
        found.append(tuple(call[1] for call in calls))
    return found


def _functions_called(lines: Sequence[Origin]) -> Part:
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
