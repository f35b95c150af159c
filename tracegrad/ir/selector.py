"""`Selector`: the base class of selectors, which find matches in a graph; and its combinations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from tracegrad.ir.nodes import Node
from tracegrad.ir.occurrence import Fragment, Occurrence, Path
from tracegrad.ir.parameters import NOT_COMBINED, Parameters

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph

Covers = Callable[[Path, Node], bool]


class Found(NamedTuple):
    """`covers` says whether the matches cover a node."""

    matches: list[Occurrence]
    covers: Covers


class Selector(ABC):
    """Finds matches in a graph; selectors combine with ``&``, ``|`` and ``~``.

    ``a & b`` finds the matches of `a` or `b` that lie within both, ``a | b`` the matches of `a` and
    of `b`, ``~a`` all single nodes outside of `a`. Selectors of one class with equal parts are
    equal, and so are rules with equal selectors.
    """

    made_by = ""  # the name of the function that makes the selector, for its repr
    patterns: tuple[str, ...] = ()  # the user's patterns, to find the nearest of `names`

    def __init__(self, *patterns: str) -> None:
        self.patterns = patterns

    @abstractmethod
    def look(self, graph: Graph) -> Found:
        """In the order of execution."""

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


def within(matches: Sequence[Occurrence]) -> Covers:
    """A node is covered if it is part of a match, or in a region of such a node."""
    members = {(match.path, node) for match in matches for node in match.nodes}

    def covers(path: Path, node: Node) -> bool:
        if (path, node) in members:
            return True
        return any((path[:i], path[i][0]) in members for i in range(len(path)))

    return covers


# ------------------------------------------------------------------------------------- combinations


class _Two(Selector):
    def __init__(self, left: Selector, right: Selector) -> None:
        super().__init__(*left.patterns, *right.patterns)
        self.left, self.right = left, right


class _And(_Two):
    def look(self, graph: Graph) -> Found:
        left, right = self.left.look(graph), self.right.look(graph)
        both = dict.fromkeys(m for m in left.matches if _lies_in(m, right.covers))
        both |= dict.fromkeys(m for m in right.matches if _lies_in(m, left.covers))
        # If a single node and a fragment with that node both match, only the fragment is kept.
        fragments = {(m.path, node): m for m in both if isinstance(m, Fragment) for node in m.nodes}
        kept = [m for m in both if isinstance(m, Fragment) or (m.path, m.node) not in fragments]

        def covers(path: Path, node: Node) -> bool:
            return left.covers(path, node) and right.covers(path, node)

        return Found(_sort_by_walk(graph, kept), covers)

    def names(self, graph: Graph) -> list[str]:
        """Returns the names for the operand that finds nothing by itself."""
        for side in (self.left, self.right):
            if not side.look(graph).matches:
                return side.names(graph)
        return []

    def __repr__(self) -> str:
        return f"{_operand_text(self.left, _Or)} & {_operand_text(self.right, _Two)}"


class _Or(_Two):
    def look(self, graph: Graph) -> Found:
        left, right = self.left.look(graph), self.right.look(graph)
        both = list(dict.fromkeys((*left.matches, *right.matches)))

        def covers(path: Path, node: Node) -> bool:
            return left.covers(path, node) or right.covers(path, node)

        return Found(_sort_by_walk(graph, both), covers)

    def names(self, graph: Graph) -> list[str]:
        return [*self.left.names(graph), *self.right.names(graph)]

    def __repr__(self) -> str:
        return f"{self.left!r} | {_operand_text(self.right, _Or)}"


class _Not(Selector):
    def __init__(self, inner: Selector) -> None:
        self.inner = inner

    def look(self, graph: Graph) -> Found:
        inner = self.inner.look(graph)
        # A call around a match is neither inside nor outside of it.
        around = {(*m.path[:i], m.path[i][0]) for m in inner.matches for i in range(len(m.path))}
        outside = [
            o
            for o in graph.walk()
            if not inner.covers(o.path, o.node) and (*o.path, o.node) not in around
        ]
        return Found(outside, lambda path, node: not inner.covers(path, node))

    def __repr__(self) -> str:
        return f"~{_operand_text(self.inner, _Two)}"


def _operand_text(selector: Selector, kind: type) -> str:
    """In parentheses, if the operand is a `kind`."""
    return f"({selector!r})" if isinstance(selector, kind) else repr(selector)


def _lies_in(match: Occurrence, covers: Covers) -> bool:
    return all(covers(match.path, node) for node in match.nodes)


def _sort_by_walk(graph: Graph, matches: list[Occurrence]) -> list[Occurrence]:
    if len(matches) < 2:
        return matches
    first = {(m.path, m.node): m for m in reversed(matches) if isinstance(m, Fragment)}
    single = {(m.path, m.node): m for m in matches if not isinstance(m, Fragment)}
    ordered = []
    for o in graph.walk():
        for table in (first, single):
            if (o.path, o.node) in table:
                ordered.append(table[o.path, o.node])
    return ordered


def _require_selector(other: Any) -> Selector:
    if isinstance(other, Parameters):
        raise TypeError(NOT_COMBINED)
    if not isinstance(other, Selector):
        raise TypeError(
            f"a selector (match.op, match.call, ...) can be combined with another one only, "
            f"not with {other!r}"
        )
    return other


# ---------------------------------------------------------------------------------- groups of nodes


# The name of a match and its nodes; the name is None for a single node, which has its own name.
Group = tuple[str | None, list[Node]]


class Grouping(Selector):
    """The base of selectors whose matches may be several nodes of a region. It finds the outermost
    matches: the regions of a matched node are not searched."""

    def look(self, graph: Graph) -> Found:
        matches = list(self._visit(graph, ()))
        return Found(matches, within(matches))

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
                # Differentiating a call in a scan, JAX leaves an empty call before the scan.
                if not any(member.outputs or member.effects for member in members):
                    continue
                if label is None:
                    yield Occurrence(path, node)
                else:
                    yield Fragment(path, node, tuple(members), label)

    @abstractmethod
    def _groups(self, graph: Graph, path: Path) -> dict[Node, Group]:
        """Returns, for each node that is part of a match, the match's name and all its nodes."""


def fits_any(name: str, patterns: tuple[str, ...]) -> bool:
    # fnmatch alone does not do: `In[3]`, a file of a notebook, is a pattern that matches `In3`.
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
