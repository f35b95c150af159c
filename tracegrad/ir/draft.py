"""The edit of one region, while it goes on: what replaces, precedes and follows each node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tracegrad.ir.borders import Edited
from tracegrad.ir.errors import GraphError
from tracegrad.ir.graph import Graph
from tracegrad.ir.nodes import Atom, Node, Value, renamed
from tracegrad.ir.occurrence import Occurrence
from tracegrad.ir.stretches import gathered
from tracegrad.ir.writing import Port, Where, Written


class Draft:
    """The edit of one region: for each node the nodes that replace, precede and follow it."""

    def __init__(self, graph: Graph, where: Where):
        self.graph, self.where = graph, where
        self.order = list(graph.nodes)
        self._here = {node.key: node for node in graph.nodes}
        self.now: dict[Any, list[Node]] = {node.key: [node] for node in graph.nodes}
        self.operands: dict[Any, list[Atom]] = {}
        self.ins: list[Port] = []
        self.outs: list[Port] = []
        self._names: dict[Value, Atom] = {}
        self._constants: dict[Value, Any] = {}
        self._before: dict[Any, list[Node]] = {}
        self._behind: dict[Any, list[Node]] = {}
        self._local: dict[Any, dict[Any, Atom]] = {}
        self._taken: dict[Any, Occurrence] = {}

    def nodes_of(self, match: Occurrence) -> list[Node]:
        """The nodes of a match, as they were before this edit."""
        found = []
        for node in match.nodes:
            if node.key in self._taken:
                raise GraphError(
                    f"{match} has operations in common with {self._taken[node.key]}, which matches "
                    "too and stands in their place now. Narrow the selector so that no two matches "
                    "overlap, or give two rules, that for the smaller matches first"
                )
            found.append(self.node_of(node, match))
        return found

    def node_of(self, node: Node, match: Occurrence) -> Node:
        """The node of the region that a node of a match, or on the way to one, is."""
        if node.key not in self._here:
            raise GraphError(f"{match} is not in {self.graph.name} (any more)")
        return self._here[node.key]

    def now_of(self, nodes: Sequence[Node], match: Occurrence) -> list[Node]:
        """The present versions of these nodes: their regions may have been edited already."""
        found = [each for node in nodes for each in self.now[node.key]]
        if [node.outputs for node in found] != [node.outputs for node in nodes]:
            raise GraphError(
                f"{match} holds other matches, whose values are led out of it: give two rules"
            )
        return found

    def gather(self, members: Sequence[Node], match: Occurrence) -> None:
        self.order = gathered(self.order, {node.key for node in members}, match)

    def replace(
        self, members: Sequence[Node], new: Written, match: Occurrence | None = None
    ) -> None:
        """Puts what was written in the place of some nodes that stand side by side."""
        self._take(new)
        for node in members:
            self.now[node.key] = []
            if match is not None:
                self._taken[node.key] = match
        self.now[members[0].key] = list(new.nodes)

    def insert(
        self, new: Written, *, before: Node | None = None, behind: Node | None = None
    ) -> None:
        self._take(new)
        if before is not None:
            self._before.setdefault(before.key, []).extend(new.nodes)
        if behind is not None:
            self._behind.setdefault(behind.key, []).extend(new.nodes)

    def rename(self, members: Iterable[Node], names: Mapping[Any, Atom]) -> None:
        """Puts other values in the place of values in `members` alone, in operands and results."""
        for node in members:
            self._local.setdefault(node.key, {}).update(names)

    def _take(self, new: Written) -> None:
        self.ins += new.ins
        self.outs += new.outs
        self._constants |= new.constants
        self._names |= new.names

    def finished(self) -> Edited:
        """The region as it is now."""
        names = self._names
        alike: dict[int, Value] = {}  # by the id of what several edits close over
        for port in self.ins:
            if port.closed_over is not None:
                first = alike.setdefault(id(port.closed_over), port.value)
                if first is not port.value:
                    names[port.value] = first
        for old, new in names.items():  # a name may lead to another one
            while isinstance(new, Value) and new in names:
                new = names[new]
            names[old] = new
        nodes = []
        for node in self.order:
            nodes += self._before.get(node.key, [])
            own = self.now[node.key]
            if node.key in self.operands:
                own = [each.with_operands(self.operands[node.key]) for each in own]
            if node.key in self._local:
                own = [each.renaming(self._local[node.key]) for each in own]
            nodes += own
            nodes += self._behind.get(node.key, [])
        outs = [replace(port, value=renamed([port.value], names)[0]) for port in self.outs]
        if names:
            nodes = [node.reading(names) for node in nodes]
        graph = self.graph.replace(
            nodes=nodes,
            outputs=renamed(self.graph.outputs, names),
            constants={**self.graph.constants, **self._constants},
        )
        return Edited(graph=graph, ins=[p for p in self.ins if p.value not in names], outs=outs)
