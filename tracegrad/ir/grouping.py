"""Some nodes of a graph taken together: what goes in, what comes out, what stands around them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tracegrad import _jax
from tracegrad.ir.errors import GraphError
from tracegrad.ir.nodes import Call, Literal, Node, Recompute, Value, copied
from tracegrad.ir.occurrence import Occurrence

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph


def entering(nodes: Sequence[Node]) -> list[Value]:
    """The values that nodes of one graph take from outside, in the order of their first use."""
    return list(dict.fromkeys(value for _, value in taken(nodes)))


def taken(nodes: Sequence[Node]) -> list[tuple[Node, Value]]:
    """Which of the nodes takes which value from outside."""
    made = {value for node in nodes for value in node.outputs}
    return [
        (node, value)
        for node in nodes
        for value in node.inputs
        if isinstance(value, Value) and value not in made
    ]


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


def set_apart(
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
        producers = {v.producer for v in node.operands}
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


def group(
    graph: Graph,
    nodes: Iterable[Node],
    recompute: bool,
    policy: Callable[..., Any] | None,
    name: str,
    copies: Sequence[Node],
) -> Call | Recompute:
    """See `Graph.group`."""
    chosen = set(nodes)
    for node in (*chosen, *copies):
        graph._check_node(node)
    if not chosen:
        raise GraphError(f"no nodes to group in {graph.name}")
    for node in copies:
        if node.effects:
            raise GraphError(f"cannot copy {Occurrence((), node)}: its effects would happen twice")
    places = [i for i, node in enumerate(graph._nodes) if node in chosen]
    stretch = slice(places[0], places[-1] + 1)
    members, before, after = set_apart(graph._nodes[stretch], chosen)
    inside = [*copies, *members]
    inputs, outputs = entering(inside), leaving(graph, members)
    graph._edited()
    region = _region_of(graph, inside, inputs, outputs, name)
    kind = Recompute if recompute else Call
    grouped = kind(
        primitive=_jax.REMAT if recompute else _jax.JIT,
        params={"policy": policy} if recompute else {"name": name},
        inputs=tuple(inputs),
        source=members[0].source,
        effects=frozenset().union(*(node.effects for node in members)),
        is_new=True,
        _regions={"jaxpr": region},
    )
    graph.adopt(grouped, [v.aval for v in outputs])
    for old, new in zip(outputs, grouped.outputs, strict=True):
        new.hint = old.hint or old.name
        for user in old.users:
            if user not in chosen:
                graph.set_inputs(user, [new if v is old else v for v in user.inputs])
        graph._outputs = tuple(new if v is old else v for v in graph._outputs)
    for node in members:
        graph._disown(node)
    graph._set_nodes(
        [*graph._nodes[: stretch.start], *before, grouped, *after, *graph._nodes[stretch.stop :]]
    )
    return grouped


def _region_of(
    graph: Graph,
    members: Sequence[Node],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    name: str,
) -> Graph:
    """A graph of copies of some nodes."""
    region = type(graph)(name, function_source=graph.function_source)
    avals, names = [v.aval for v in inputs], [v.name for v in inputs]
    values: dict[Value, Value | Literal] = dict(
        zip(inputs, region.add_inputs(avals, names), strict=True)
    )
    for node in members:
        new = copied(node, [values[v] if isinstance(v, Value) else v for v in node.inputs])
        region.append(new, [v.aval for v in node.outputs])
        values.update(zip(node.outputs, new.outputs, strict=True))
    region.add_outputs([values[v] for v in outputs])
    return region
