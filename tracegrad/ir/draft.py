"""The unfinished edit of one region: the nodes that replace and follow each node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tracegrad.ir.borders import Edited
from tracegrad.ir.errors import GraphError
from tracegrad.ir.graph import Graph
from tracegrad.ir.node_groups import make_adjacent
from tracegrad.ir.nodes import Atom, Node, Value, renamed
from tracegrad.ir.occurrence import Occurrence
from tracegrad.ir.writing import Port, Surroundings, Written


class Draft:
    """Collects the edits of one region; `finished` returns the edited region.

    Attributes:
      order: the nodes before the edit, in the order in which their replacements will stand.
      now: by the key of a node, the nodes that replace it; the node itself if it is not replaced.
      ins: ports of new inputs of the region.
      outs: ports of new outputs of the region.
    """

    def __init__(self, graph: Graph, surroundings: Surroundings):
        self.graph, self.surroundings = graph, surroundings
        self.order = list(graph.nodes)
        self._node_by_key = {node.key: node for node in graph.nodes}
        self.now: dict[Any, list[Node]] = {node.key: [node] for node in graph.nodes}
        self.ins: list[Port] = []
        self.outs: list[Port] = []
        self._renames: dict[Value, Atom] = {}
        self._constants: dict[Value, Any] = {}
        self._behind: dict[Any, list[Node]] = {}
        self._local_renames: dict[Any, dict[Any, Atom]] = {}
        self._replaced_by: dict[Any, Occurrence] = {}

    def nodes_of(self, match: Occurrence) -> list[Node]:
        """Returns the region's nodes of a match, as they were before this edit. Raises GraphError
        if the match overlaps a replaced match, or is not in the region."""
        found = []
        for node in match.nodes:
            if node.key in self._replaced_by:
                raise GraphError(
                    f"{match} has operations in common with {self._replaced_by[node.key]}, a "
                    "match that was replaced before. Narrow the selector so that no two matches "
                    "overlap, or give two rules, first the rule for the smaller matches"
                )
            found.append(self.node_of(node, match))
        return found

    def node_of(self, node: Node, match: Occurrence) -> Node:
        """Finds the region's node for a node of a match, or on the path to a match."""
        if node.key not in self._node_by_key:
            raise GraphError(f"{match} is not in {self.graph.name}, or was removed by an edit")
        return self._node_by_key[node.key]

    def now_of(self, nodes: Sequence[Node], match: Occurrence) -> list[Node]:
        """Returns what replaces the nodes so far: matches inside their regions are edited first."""
        found = [each for node in nodes for each in self.now[node.key]]
        if [node.outputs for node in found] != [node.outputs for node in nodes]:
            raise GraphError(
                f"{match} contains other matches, whose edit added outputs to it: give two rules, "
                "one for the inner matches and one for the outer"
            )
        return found

    def gather(self, members: Sequence[Node], match: Occurrence) -> None:
        self.order = make_adjacent(self.order, {node.key for node in members}, match)

    def replace(
        self, members: Sequence[Node], new: Written, match: Occurrence | None = None
    ) -> None:
        """Replaces adjacent nodes with the nodes of `new`; no later match may overlap `match`."""
        self._add_ports_and_names(new)
        first, nodes = members[0], list(new.nodes)
        for node in members:
            self.now[node.key] = []
            if match is not None:
                self._replaced_by[node.key] = match
        if len(nodes) == 1 and nodes[0].primitive is first.primitive and nodes[0].regions:
            nodes = [replace(nodes[0], key=first.key)]  # later edits find the node by its key
        self.now[first.key] = nodes

    def insert(self, new: Written, *, behind: Node) -> None:
        self._add_ports_and_names(new)
        self._behind.setdefault(behind.key, []).extend(new.nodes)

    def rename(self, members: Iterable[Node], names: Mapping[Any, Atom]) -> None:
        """Replaces values in the operands and results of `members`, and of no other nodes."""
        for node in members:
            self._local_renames.setdefault(node.key, {}).update(names)

    def _add_ports_and_names(self, new: Written) -> None:
        self.ins += new.ins
        self.outs += new.outs
        self._constants |= new.constants
        self._renames |= new.names

    def finished(self) -> Edited:
        """Returns the edited region. Inputs that close over the same object become one input."""
        names = self._renames
        first_input: dict[int, Value] = {}  # id of an object closed over: the first input for it
        for port in self.ins:
            if port.closed_over is not None:
                first = first_input.setdefault(id(port.closed_over), port.value)
                if first is not port.value:
                    names[port.value] = first
        for old, new in names.items():  # the new value may be renamed too
            while isinstance(new, Value) and new in names:
                new = names[new]
            names[old] = new
        nodes = []
        for node in self.order:
            own = self.now[node.key]
            if node.key in self._local_renames:
                own = [each.with_renamed_values(self._local_renames[node.key]) for each in own]
            nodes += own
            nodes += self._behind.get(node.key, [])
        outs = [replace(port, value=renamed([port.value], names)[0]) for port in self.outs]
        if names:
            nodes = [node.with_renamed_operands(names) for node in nodes]
        graph = self.graph.replace(
            nodes=nodes,
            outputs=renamed(self.graph.outputs, names),
            constants={**self.graph.constants, **self._constants},
        )
        return Edited(graph=graph, ins=[p for p in self.ins if p.value not in names], outs=outs)
