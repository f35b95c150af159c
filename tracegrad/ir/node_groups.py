"""Finds the values that enter and leave a group of nodes, and makes the nodes adjacent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tracegrad.ir.errors import GraphError
from tracegrad.ir.nodes import Node, Value, is_reference
from tracegrad.ir.occurrence import Occurrence
from tracegrad.ir.operations import PROMOTIONS

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph


class Computes(Protocol):
    """A part of a program that computes values from operands: a node, or several nodes as one."""

    @property
    def key(self) -> Any: ...

    @property
    def operands(self) -> Sequence[Value]: ...

    @property
    def outputs(self) -> Sequence[Value]: ...

    @property
    def effects(self) -> Collection[Any]: ...


C = TypeVar("C", bound=Computes)


def values_entering(nodes: Sequence[Computes]) -> list[Value]:
    """Returns the values that enter a group, in the order of first use."""
    made = {value for node in nodes for value in node.outputs}
    used = (value for node in nodes for value in node.operands)
    return list(dict.fromkeys(value for value in used if value not in made))


def operands_of(nodes: Sequence[Node]) -> list[Value]:
    """Returns the values that enter a match of several nodes, in the order of first use.

    A broadcast or a cast does not count as a use, but the uses of its result do: JAX inserts
    broadcasts and casts before an operation if the types of its operands differ, and the order must
    not depend on types.
    """
    promoted_from: dict[Value, Value] = {}
    used: list[Value] = []
    for node in nodes:
        sources = [promoted_from.get(value, value) for value in node.operands]
        if node.op in PROMOTIONS and sources:
            promoted_from[node.outputs[0]] = sources[0]
        else:
            used += sources
    entered = dict.fromkeys(values_entering(nodes))
    return [*dict.fromkeys(value for value in (*used, *entered) if value in entered)]


def values_leaving(graph: Graph, nodes: Sequence[Node]) -> list[Value]:
    """Returns the results of a group that other nodes or the graph's outputs use; for a single
    node, all its results. Omits Refs."""
    made = [value for node in nodes for value in node.outputs]
    if len(nodes) > 1:
        members = {node.key for node in nodes}
        made = [
            value
            for value in made
            if value in graph.results
            or any(n.key not in members for n in graph.users.get(value, ()))
        ]
    return [value for value in made if not is_reference(value)]


def refuse_references(graph: Graph, nodes: Sequence[Node], match: Occurrence) -> None:
    """Raises GraphError for a match that makes a Ref for other nodes, or writes to a Ref from
    outside. Gradients that flow through such a Ref would bypass an edit of the match."""
    if not any(node.has_references for node in nodes):
        return
    made = {value for node in nodes for value in node.outputs if is_reference(value)}
    members = {node.key for node in nodes}
    others = (n for value in made for n in graph.users.get(value, ()) if n.key not in members)
    writes = (
        value
        for node in nodes
        if node.op != _READ
        for value in node.operands
        if is_reference(value) and value not in made
    )
    if next(others, None) or next(writes, None) or not made.isdisjoint(graph.results):
        raise GraphError(
            f"{match} makes a jax.Ref or writes to one, by which gradients flow past any rule for "
            "it. Match all that uses the Ref together (a call, a scope), or leave this out: "
            "& ~match.where(lambda found: any(node.has_references for node in found.nodes))"
        )


_READ = "get"  # the primitive that reads an array out of a Ref


def make_adjacent(nodes: Sequence[C], chosen: Collection[Any], match: object) -> list[C]:
    """Reorders nodes so that the chosen nodes (by their keys) are adjacent.

    Nodes between chosen nodes come after the group if they depend on a chosen node, else before it.
    Nodes with effects keep their order. Raises GraphError if no such order exists.
    """
    positions = [i for i, node in enumerate(nodes) if node.key in chosen]
    start, stop = positions[0], positions[-1] + 1
    members: list[C] = []
    before: list[C] = []
    after: list[C] = []
    late: dict[Value, C] = {}  # the results of chosen nodes and of nodes that depend on them
    effect_is_late = False
    for node in nodes[start:stop]:
        makers = [late[value] for value in node.operands if value in late]
        is_late = bool(makers) or (bool(node.effects) and effect_is_late)
        if node.key in chosen:
            outside = next((maker for maker in makers if maker.key not in chosen), None)
            if outside is not None:
                raise GraphError(
                    f"cannot group {match}: {_describe(outside)} depends on one of the nodes "
                    f"and {_describe(node)} depends on it (the set is not convex)"
                )
            if node.effects and any(n.effects for n in after):
                raise GraphError(
                    f"cannot group {match}: {_describe(node)} would have its effect before "
                    f"the effect of {_describe(next(n for n in after if n.effects))}"
                )
            members.append(node)
            is_late = True
        elif is_late:
            after.append(node)
        else:
            before.append(node)
        if is_late:
            late |= dict.fromkeys(node.outputs, node)
            effect_is_late = effect_is_late or bool(node.effects)
    return [*nodes[:start], *before, *members, *after, *nodes[stop:]]


def _describe(node: Computes) -> str:
    return str(Occurrence((), node)) if isinstance(node, Node) else repr(node)
