"""Some nodes of a graph taken together: what enters and leaves them, and how they are gathered."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tracegrad.ir.errors import GraphError
from tracegrad.ir.nodes import Node, Value, is_reference
from tracegrad.ir.occurrence import Occurrence

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph


class Computes(Protocol):
    """What stands in a program and computes values of others: a node, or several as one."""

    @property
    def key(self) -> Any: ...

    @property
    def operands(self) -> Sequence[Value]: ...

    @property
    def outputs(self) -> Sequence[Value]: ...

    @property
    def effects(self) -> Collection[Any]: ...


C = TypeVar("C", bound=Computes)


def entering(nodes: Sequence[Computes]) -> list[Value]:
    """The values that nodes of one graph take from outside, in the order of their first use."""
    made = {value for node in nodes for value in node.outputs}
    used = (value for node in nodes for value in node.operands)
    return list(dict.fromkeys(value for value in used if value not in made))


def leaving(graph: Graph, nodes: Sequence[Node]) -> list[Value]:
    """The arrays by which others, or the graph's outputs, use nodes of it; of a single node all."""
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
    """Raises GraphError for a match that makes a Ref for others, or writes to one of them: what
    flows back by that would pass an edit of the match by."""
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


_READ = "get"  # of an array out of a Ref


def gathered(nodes: Sequence[C], chosen: Collection[Any], match: object) -> list[C]:
    """The nodes with the chosen ones (by their keys) side by side: what depends on one of them
    comes behind them, the rest before. Effects count as a chain of dependences.

    Raises GraphError if they cannot stand together so.
    """
    places = [i for i, node in enumerate(nodes) if node.key in chosen]
    start, stop = places[0], places[-1] + 1
    members: list[C] = []
    before: list[C] = []
    after: list[C] = []
    late: dict[Value, C] = {}  # what the chosen make, and what depends on that
    effect_is_late = False
    for node in nodes[start:stop]:
        makers = [late[value] for value in node.operands if value in late]
        is_late = bool(makers) or (bool(node.effects) and effect_is_late)
        if node.key in chosen:
            outside = next((maker for maker in makers if maker.key not in chosen), None)
            if outside is not None:
                raise GraphError(
                    f"cannot group {match}: {_told(outside)} depends on one of the nodes "
                    f"and {_told(node)} depends on it (the set is not convex)"
                )
            if node.effects and any(n.effects for n in after):
                raise GraphError(
                    f"cannot group {match}: {_told(node)} would have its effect before "
                    f"that of {_told(next(n for n in after if n.effects))}"
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


def _told(node: Computes) -> str:
    return str(Occurrence((), node)) if isinstance(node, Node) else repr(node)
