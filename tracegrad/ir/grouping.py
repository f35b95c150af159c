"""Some nodes of a graph taken together: what goes in, what comes out, what stands around them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tracegrad.ir.errors import GraphError
from tracegrad.ir.nodes import Node, Value
from tracegrad.ir.occurrence import Occurrence

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph


def entering(nodes: Sequence[Node]) -> list[Value]:
    """The values that nodes of one graph take from outside, in the order of their first use."""
    made = {value for node in nodes for value in node.outputs}
    return list(
        dict.fromkeys(
            value
            for node in nodes
            for value in node.inputs
            if isinstance(value, Value) and value not in made
        )
    )


def leaving(graph: Graph, nodes: Sequence[Node]) -> list[Value]:
    """The values by which others, or the graph's outputs, use nodes of it."""
    members = set(nodes)
    returned = {value for value in graph.outputs if isinstance(value, Value)}
    return [
        value
        for node in nodes
        for value in node.outputs
        if value in returned or any(user not in members for user in value.users)
    ]


def parted(
    nodes: Sequence[Node], chosen: Collection[Node]
) -> tuple[list[Node], list[Node], list[Node]]:
    """Sorts a stretch of a graph's nodes, from the first to the last chosen one, into the chosen,
    those that can stand before and those that must stand after. Effects count as a chain of
    dependences.

    Raises GraphError if they cannot stand together so.
    """
    members: list[Node] = []
    before: list[Node] = []
    after: list[Node] = []
    late: set[Node] = set()  # the chosen, and what depends on one of them
    effect_is_late = False
    for node in nodes:
        producers = {v.producer for v in node.inputs if isinstance(v, Value)}
        chained = bool(node.effects) and effect_is_late
        if node in chosen:
            outside = next((p for p in producers if p in late and p not in chosen), None)
            if outside is not None:
                raise GraphError(
                    f"cannot group: {Occurrence((), outside)} depends on one of the nodes and "
                    f"{Occurrence((), node)} depends on it (the set is not convex)"
                )
            if node.effects and any(n.effects for n in after):
                raise GraphError(
                    f"cannot group: {Occurrence((), node)} would have its effect before that of "
                    f"{Occurrence((), next(n for n in after if n.effects))}"
                )
            members.append(node)
            late.add(node)
        elif chained or any(p in late for p in producers):
            after.append(node)
            late.add(node)
        else:
            before.append(node)
        effect_is_late = effect_is_late or (bool(node.effects) and node in late)
    return members, before, after
