"""The parts of a program that a reader knows: its named scopes or, where few are named, calls.

Plain functions have no scopes; the lines that their operations come from tell the same: in which
function, called where.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from tracegrad import _jax
from tracegrad.ir import Graph, Occurrence, scopes
from tracegrad.ir.occurrence import Origin, is_user_file

Part = tuple[str, ...]  # the names of the parts around a node, from the outside in


def parts_of(graph: Graph, *, of_rule: bool = False) -> tuple[list[Part], bool]:
    """For each node of a graph the parts that it lies in, within the graph.

    `of_rule`: the graph is a custom gradient's rule, which is traced as it is differentiated: that
    it came through JAX's ``jvp`` says nothing there.

    Returns them, and whether they are named scopes. They are if at least half of the nodes have
    one. Else they are calls, ``Block (model.py:12)``, under what JAX's transformations leave
    (``transpose(jvp())``: a backward pass) and around what scopes there are.
    """
    nodes = [Occurrence((), node) for node in graph.nodes]
    stacks = [scopes.around(node) for node in graph.nodes]
    if of_rule:
        stacks = [_without_bare_jvp(stack) for stack in stacks]
    split = [(_passes(stack, of_rule), scopes.scopes(stack)) for stack in stacks]
    if 2 * sum(1 for _, names in split if names) >= max(1, len(nodes)):
        return [_frames(stack) for stack in stacks], True
    return _calls(nodes, split), False


def _without_bare_jvp(stack: tuple[_jax.Around, ...]) -> tuple[_jax.Around, ...]:
    """A stack without the ``jvp`` that it ends in, with no scope inside."""
    return stack[:-1] if stack and stack[-1] == ("jvp", True) else stack


def _passes(stack: Sequence[_jax.Around], of_rule: bool) -> Part:
    """The pass of a derivative that a stack tells of."""
    through = scopes.transformations(stack)
    if "transpose" in through:
        return ("transpose(jvp())",)
    return ("jvp()",) if "jvp" in through and not of_rule else ()


def _frames(stack: Sequence[_jax.Around]) -> Part:
    """The scopes of a stack from the outside in; one in a transformation, ``jvp(a/b)``, is whole.

    >>> _frames([("model", False), ("jvp", True), ("encoder/block", False), ("attend/key", False)])
    ('model', 'jvp(encoder/block)', 'attend', 'key')
    """
    frames: list[str] = []
    outer: list[_jax.Around] = []  # transformations around the scope that follows
    for each in stack:
        name, is_transformation = each
        if is_transformation or outer:
            outer.append(each)
        if outer and not is_transformation:
            frames.append(scopes.text(outer))
            outer = []
        elif not outer:
            frames += filter(None, name.split("/"))
    return (*frames, scopes.text(outer)) if outer else tuple(frames)


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
