"""`Selector`: the base class of selectors, which find matches in a graph; and its combinations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from tracegrad.ir.nodes import Node
from tracegrad.ir.occurrence import Fragment, Occurrence, Path

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph

Covers = Callable[[Path, Node], bool]


class Selection(NamedTuple):
    """The matches of a selector in the order of execution, and whether they cover a node."""

    matches: list[Occurrence]
    covers: Covers


class Selector(ABC):
    """Finds matches in a graph; selectors combine with ``&``, ``|`` and ``~``.

    ``a & b`` finds the matches of `a` or `b` that lie within both, ``a | b`` the matches of `a` and
    of `b`, ``~a`` all single nodes outside of the matches of `a`. Selectors of one class with equal
    parts are equal. Rules are not: each call of a function of `tracegrad.rules` makes another rule.
    """

    made_by = ""  # the name of the function that makes the selector, for its repr
    patterns: tuple[str, ...] = ()  # the user's patterns, to find the nearest of `names`

    def __init__(self, *patterns: str) -> None:
        self.patterns = patterns

    @abstractmethod
    def select_in(self, graph: Graph) -> Selection:
        """Finds the matches in a graph."""

    def names(self, graph: Graph) -> list[str]:
        """Returns the names that a pattern could match in a graph, for messages."""
        return []

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __repr__(self) -> str:
        return f"{self.made_by}({', '.join(map(repr, self.patterns))})"

    def __and__(self, other: Selector) -> Selector:
        return _And(self, _require_selector(other))

    def __or__(self, other: Selector) -> Selector:
        return _Or(self, _require_selector(other))

    def __invert__(self) -> Selector:
        return _Not(self)


def covered_by(matches: Sequence[Occurrence]) -> Covers:
    """Returns whether a node is covered: it is part of a match, or in a region of such a node."""
    members = {(match.path, node) for match in matches for node in match.nodes}

    def covers(path: Path, node: Node) -> bool:
        if (path, node) in members:
            return True
        return any((path[:i], path[i][0]) in members for i in range(len(path)))

    return covers


# ------------------------------------------------------------------------------------- combinations


class _Pair(Selector):
    def __init__(self, left: Selector, right: Selector) -> None:
        super().__init__(*left.patterns, *right.patterns)
        self.left, self.right = left, right


class _And(_Pair):
    def select_in(self, graph: Graph) -> Selection:
        left, right = self.left.select_in(graph), self.right.select_in(graph)
        both = dict.fromkeys(m for m in left.matches if _lies_in(m, right.covers))
        both |= dict.fromkeys(m for m in right.matches if _lies_in(m, left.covers))
        # If a single node and a fragment with that node both match, only the fragment is kept.
        fragments = {(m.path, node): m for m in both if isinstance(m, Fragment) for node in m.nodes}
        kept = [m for m in both if isinstance(m, Fragment) or (m.path, m.node) not in fragments]

        def covers(path: Path, node: Node) -> bool:
            return left.covers(path, node) and right.covers(path, node)

        return Selection(_sort_by_walk(graph, kept), covers)

    def names(self, graph: Graph) -> list[str]:
        """Returns the names for the operand that matches nothing by itself."""
        for side in (self.left, self.right):
            if not side.select_in(graph).matches:
                return side.names(graph)
        return []

    def __repr__(self) -> str:
        return f"{_operand_text(self.left, _Or)} & {_operand_text(self.right, _Pair)}"


class _Or(_Pair):
    def select_in(self, graph: Graph) -> Selection:
        left, right = self.left.select_in(graph), self.right.select_in(graph)
        both = list(dict.fromkeys((*left.matches, *right.matches)))

        def covers(path: Path, node: Node) -> bool:
            return left.covers(path, node) or right.covers(path, node)

        return Selection(_sort_by_walk(graph, both), covers)

    def names(self, graph: Graph) -> list[str]:
        return [*self.left.names(graph), *self.right.names(graph)]

    def __repr__(self) -> str:
        return f"{self.left!r} | {_operand_text(self.right, _Or)}"


class _Not(Selector):
    def __init__(self, inner: Selector) -> None:
        self.inner = inner

    def select_in(self, graph: Graph) -> Selection:
        inner = self.inner.select_in(graph)
        # A call around a match is neither inside nor outside of it.
        around = {(*m.path[:i], m.path[i][0]) for m in inner.matches for i in range(len(m.path))}
        outside = [
            o
            for o in graph.walk()
            if not inner.covers(o.path, o.node) and (*o.path, o.node) not in around
        ]
        return Selection(outside, lambda path, node: not inner.covers(path, node))

    def __repr__(self) -> str:
        return f"~{_operand_text(self.inner, _Pair)}"


def _operand_text(selector: Selector, in_parentheses: type) -> str:
    """Returns an operand as code; a selector of the class `in_parentheses` gets them."""
    return f"({selector!r})" if isinstance(selector, in_parentheses) else repr(selector)


def _lies_in(match: Occurrence, covers: Covers) -> bool:
    return all(covers(match.path, node) for node in match.nodes)


def _sort_by_walk(graph: Graph, matches: list[Occurrence]) -> list[Occurrence]:
    """Sorts matches by their first nodes; of fragments with the same nodes, keeps the first."""
    if len(matches) < 2:
        return matches
    distinct: dict[Any, Occurrence] = {}
    for m in matches:
        distinct.setdefault((type(m), m.path, m.nodes), m)
    by_first_node: dict[Any, list[Occurrence]] = {}
    for m in sorted(distinct.values(), key=lambda m: type(m) is Occurrence):
        by_first_node.setdefault((m.path, m.node), []).append(m)
    return [m for o in graph.walk() for m in by_first_node.get((o.path, o.node), ())]


def _require_selector(other: Any) -> Selector:
    if not isinstance(other, Selector):
        raise TypeError(
            f"a selector (match.op, match.call, ...) can be combined only with another selector, "
            f"not with {other!r}"
        )
    return other


# ---------------------------------------------------------------------------------- groups of nodes


# The name of a match and its nodes; the name is None for a single node, which has its own name.
Group = tuple[str | None, list[Node]]


class Grouping(Selector):
    """The base class of selectors whose matches may be several nodes of a region. They find only
    outermost matches: the regions of a matched node are not searched."""

    def select_in(self, graph: Graph) -> Selection:
        matches = list(self._visit(graph, ()))
        return Selection(matches, covered_by(matches))

    def _visit(self, graph: Graph, path: Path) -> Iterator[Occurrence]:
        groups = self._groups(graph, path)
        started: set[int] = set()
        for node in graph.nodes:
            group = groups.get(node)
            if group is None:
                for name, region in node.regions.items():
                    yield from self._visit(region, (*path, (node, name)))
            elif id(group) not in started:
                started.add(id(group))
                label, members = group
                # When JAX differentiates a call in a scan, it leaves an empty call before the scan.
                if not any(member.outputs or member.effects for member in members):
                    continue
                if label is None:
                    yield Occurrence(path, node)
                else:
                    yield Fragment(path, node, tuple(members), label)

    @abstractmethod
    def _groups(self, graph: Graph, path: Path) -> dict[Node, Group]:
        """Returns, for each node that is part of a match, the match's name and all its nodes. The
        nodes of one match have the same `Group` object."""


def fits_any(name: str, patterns: tuple[str, ...]) -> bool:
    # fnmatch alone does not suffice: `In[3]`, a notebook's cell, is a pattern that matches `In3`.
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
