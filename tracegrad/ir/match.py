"""Selectors: which places of a program are meant, by operation, call, scope or source line.

A selector finds *matches*. A match is an `Occurrence`: one node and the calls that lead to it; or,
where a function was inlined by JAX, or a scope or a line is meant, a `Fragment`: several nodes of
one region that belong together. The same selector works on a traced graph and on a recorded tape,
and looks into the bodies of loops, branches and calls.

>>> import jax, jax.numpy as jnp, tracegrad as tg
>>> def f(x):
...     with jax.named_scope("block_0"):
...         x = jax.nn.softmax(jnp.sin(x))
...     return jax.nn.relu(x)
>>> g = tg.graph(f)(jnp.ones(3))
>>> [str(m.node.op) for m in g.find(tg.match.op("sin", "exp"))]
['sin', 'exp']
>>> len(g.find(tg.match.call("softmax"))), len(g.find(tg.match.scope("block_*")))
(1, 1)
>>> [m.node.op for m in g.find(tg.match.op("exp") & ~tg.match.call("softmax"))]
[]

The idea of selecting by name is that of TensorFlow's ``gradient_override_map``, by place that of
``torch.fx``'s subgraph matching.
"""

from __future__ import annotations

import functools
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from tracegrad import _jax
from tracegrad.ir.errors import GraphError
from tracegrad.ir.frames import Frame, Stack, is_in_loop, loops_between, stack_of
from tracegrad.ir.nodes import Node
from tracegrad.ir.occurrence import Fragment, Occurrence, Origin, Path, is_user_file

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph

Covers = Callable[[Path, Node], bool]


@dataclass(frozen=True)
class Found:
    """What a selector found in a graph: its matches, and whether a node is part of one."""

    matches: list[Occurrence]
    covers: Covers


class Selector(ABC):
    """Finds places in a graph; combined with ``&``, ``|`` and ``~``.

    ``a & b`` are the matches of either that lie within both, ``a | b`` those of both, ``~a`` all
    single nodes outside of `a`.
    """

    @abstractmethod
    def look(self, graph: Graph) -> Found:
        """Its matches in a graph, in the order of execution."""

    def names(self, graph: Graph) -> list[str]:
        """What it could have been asked for in this graph: for messages, when nothing matches."""
        return []

    @property
    def patterns(self) -> tuple[str, ...]:
        """What it was asked for, to find the nearest of `names`."""
        return ()

    def __and__(self, other: Selector) -> Selector:
        return _And(self, _selector(other))

    def __or__(self, other: Selector) -> Selector:
        return _Or(self, _selector(other))

    def __invert__(self) -> Selector:
        return _Not(self)


def op(*names: str) -> Selector:
    """Single operations, by the names of their primitives.

    Args:
      *names: names of JAX primitives (``"dot_general"``, ``"exp"``); ``*`` stands for any letters.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> [m.node.op for m in tg.graph(lambda x: jnp.exp(x) @ x)(jnp.ones(2)).find(
    ...     tg.match.op("dot*"))]
    ['dot_general']
    """
    return _Op(_checked(names, "match.op", "dot_general"))


def call(*names: str) -> Selector:
    """Calls of functions, by their names.

    A call is found whether JAX keeps it in the program (jitted functions and custom rules, by
    their names) or inlines it (as most functions, `jax.nn.softmax` and `jax.nn.gelu` among them,
    by the traceback of each operation). What an inlined call has become is one match, a
    `Fragment`; of calls in calls the outermost matches.

    Args:
      *names: a function's name (``"softmax"``), a method's (``"Attention.__call__"``) or, for the
        call of an object, its class's (``"Attention"``); ``*`` stands for any letters.

    Finding raises GraphError where inlined calls follow one another and cannot be told apart: in
    a loop, when the function has a loop of its own. Give them named scopes then.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def twice(x):
    ...     return jax.nn.softmax(jax.nn.softmax(x))
    >>> len(tg.graph(twice)(jnp.ones(2)).find(tg.match.call("softmax")))
    2
    """
    return _CallOf(_checked(names, "match.call", "relu"))


def scope(*globs: str) -> Selector:
    """What lies in a named scope: of flax modules, equinox layers, `jax.named_scope`.

    Each time the scope is entered is one match, a `Fragment` if it holds several operations.
    Where a scope is entered again at once, with no operation between, the two are one match.

    Args:
      *globs: patterns for components of the scope path, one after the other: ``"block_*"``,
        ``"block_*/attention"``. ``*`` stands for any letters in one component, ``**`` for any
        number of components, a leading ``/`` for the outermost scope. What transformations write
        around names (``vmap(block_0)``) does not matter.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def f(x):
    ...     for i in range(3):
    ...         with jax.named_scope(f"block_{i}"):
    ...             x = jnp.cos(jnp.sin(x))
    ...     return x
    >>> g = tg.graph(f)(1.0)
    >>> [m.name for m in g.find(tg.match.scope("block_[12]"))]
    ['block_1', 'block_2']
    """
    return _Scope(_checked(globs, "match.scope", "block_*/attention"))


def source(*places: str) -> Selector:
    """What a line, a function or a file of the user's code computes.

    Each time the line or the function is executed is one match, a `Fragment` if that gave several
    operations. An operation belongs to the innermost line of the user's own code that led to it,
    not to lines of installed libraries.

    Args:
      *places: ``"model.py:42"`` (in a notebook ``"In[3]:42"``), ``"model.py"``, or the name of a
        function (``"Block.__call__"``); ``*`` stands for any letters.
    """
    return _SourceOf(_checked(places, "match.source", "model.py:42"))


def where(predicate: Callable[[Occurrence], object]) -> Selector:
    """Single nodes for which a function of the occurrence is true.

    Args:
      predicate: is given each `Occurrence` (``.node``, ``.scope``, ``.origin``, ``.path``).

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> big = tg.match.where(lambda o: any(v.aval.size > 5 for v in o.node.outputs))
    >>> [m.node.op for m in tg.graph(lambda x: jnp.sin(jnp.outer(x, x)))(jnp.ones(3)).find(big)]
    ['mul', 'sin']
    """
    if not callable(predicate):
        raise TypeError(f"match.where takes a function of an Occurrence, not {predicate!r}")
    return _Where(predicate)


# ------------------------------------------------------------------------------------ composition


def _within(matches: Sequence[Occurrence]) -> Covers:
    """Whether a node belongs to one of these, or to a region below one."""
    members = {(match.path, node) for match in matches for node in match.nodes}

    def covers(path: Path, node: Node) -> bool:
        if (path, node) in members:
            return True
        return any((path[:i], path[i][0]) in members for i in range(len(path)))

    return covers


def _lies_in(match: Occurrence, covers: Covers) -> bool:
    return all(covers(match.path, node) for node in match.nodes)


@dataclass(frozen=True)
class _And(Selector):
    left: Selector
    right: Selector

    def look(self, graph: Graph) -> Found:
        left, right = self.left.look(graph), self.right.look(graph)
        both = [m for m in left.matches if _lies_in(m, right.covers)]
        both += [m for m in right.matches if _lies_in(m, left.covers) and m not in both]
        # Of a call and its own operations, both of them in a scope, the call is meant.
        fragments = {(m.path, node): m for m in both if isinstance(m, Fragment) for node in m.nodes}
        kept = [m for m in both if isinstance(m, Fragment) or (m.path, m.node) not in fragments]

        def covers(path: Path, node: Node) -> bool:
            return left.covers(path, node) and right.covers(path, node)

        return Found(_in_order(graph, kept), covers)

    def names(self, graph: Graph) -> list[str]:
        """Of the side that finds nothing by itself."""
        for side in (self.left, self.right):
            if not side.look(graph).matches:
                return side.names(graph)
        return []

    @property
    def patterns(self) -> tuple[str, ...]:
        return (*self.left.patterns, *self.right.patterns)

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True)
class _Or(Selector):
    left: Selector
    right: Selector

    def look(self, graph: Graph) -> Found:
        left, right = self.left.look(graph), self.right.look(graph)
        both = [*left.matches, *(m for m in right.matches if m not in left.matches)]

        def covers(path: Path, node: Node) -> bool:
            return left.covers(path, node) or right.covers(path, node)

        return Found(_in_order(graph, both), covers)

    def names(self, graph: Graph) -> list[str]:
        return [*self.left.names(graph), *self.right.names(graph)]

    @property
    def patterns(self) -> tuple[str, ...]:
        return (*self.left.patterns, *self.right.patterns)

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True)
class _Not(Selector):
    inner: Selector

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
        return f"~{self.inner!r}"


def _in_order(graph: Graph, matches: list[Occurrence]) -> list[Occurrence]:
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


def _selector(other: Any) -> Selector:
    if not isinstance(other, Selector):
        raise TypeError(
            f"a selector (match.op, match.call, ...) is combined with another one, "
            f"not with {other!r}"
        )
    return other


def _checked(names: tuple[str, ...], function: str, example: str) -> tuple[str, ...]:
    if not names or "" in names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{function} takes names, as in {function}({example!r}); it was given "
            f"{', '.join(map(repr, names)) or 'nothing'}"
        )
    return names


# ------------------------------------------------------------------------------------ single nodes


@dataclass(frozen=True)
class _Op(Selector):
    patterns_: tuple[str, ...]

    def look(self, graph: Graph) -> Found:
        matches = [o for o in graph.walk() if _is_any(o.node.op, self.patterns_)]
        return Found(matches, _within(matches))

    def names(self, graph: Graph) -> list[str]:
        return list(dict.fromkeys(o.node.op for o in graph.walk()))

    @property
    def patterns(self) -> tuple[str, ...]:
        return self.patterns_

    def __repr__(self) -> str:
        return f"match.op({', '.join(map(repr, self.patterns_))})"


@dataclass(frozen=True)
class _Where(Selector):
    predicate: Callable[[Occurrence], object]

    def look(self, graph: Graph) -> Found:
        matches = [o for o in graph.walk() if self.predicate(o)]
        return Found(matches, _within(matches))

    def __repr__(self) -> str:
        return f"match.where({self.predicate!r})"


# --------------------------------------------------------------------------------- groups of nodes


# The nodes of a match, and what they are called; None: it is one node, with a name of its own.
Group = tuple[str | None, list[Node]]


@dataclass(frozen=True)
class _Grouping(Selector):
    """Selectors whose matches may be several nodes: the outermost ones are found, region by
    region."""

    patterns_: tuple[str, ...]

    @property
    def patterns(self) -> tuple[str, ...]:
        return self.patterns_

    def look(self, graph: Graph) -> Found:
        matches = list(self._visit(graph, ()))
        return Found(matches, _within(matches))

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
                if label is None:
                    yield Occurrence(path, node)
                else:
                    yield Fragment(path, node, tuple(members), label)

    @abstractmethod
    def _groups(self, graph: Graph, path: Path) -> dict[Node, Group]:
        """For each node of the region that is part of a match: its name and all its nodes."""


@dataclass(frozen=True)
class _Scope(_Grouping):
    def _groups(self, graph: Graph, path: Path) -> dict[Node, Group]:
        outside = [part for node, _ in path for part in _scope_parts(node)]
        groups: dict[Node, Group] = {}
        last: tuple[str, ...] | None = None
        for node in graph.nodes:
            inside = self._inside((*outside, *_scope_parts(node)))
            if inside is not None:
                if inside != last:
                    current: tuple[str, list[Node]] = ("/".join(inside), [])
                current[1].append(node)
                groups[node] = current
            last = inside
        return groups

    def _inside(self, parts: tuple[str, ...]) -> tuple[str, ...] | None:
        """The part of a scope path down to where a pattern is first fulfilled."""
        ends = [end for p in self.patterns_ if (end := _scope_end(p, parts)) is not None]
        return parts[: min(ends)] if ends else None

    def names(self, graph: Graph) -> list[str]:
        full = (o.scope for o in graph.walk())
        paths = dict.fromkeys("/".join(_components(text)) for text in full)
        parts = [part for path in paths for part in path.split("/")]
        return [name for name in dict.fromkeys([*paths, *parts]) if name]

    def __repr__(self) -> str:
        return f"match.scope({', '.join(map(repr, self.patterns_))})"


def _scope_parts(node: Node) -> tuple[str, ...]:
    return () if node.source is None else _components(_jax.name_stack(node.source.info))


@functools.lru_cache(maxsize=4096)
def _components(text: str) -> tuple[str, ...]:
    """The names in a name stack, without what transformations put around them."""
    found = []
    for part in text.split("/"):
        name = part
        while wrapped := re.fullmatch(r"\w+\((.*)\)", name):
            name = wrapped[1]
        if name:
            found.append(name)
    return tuple(found)


@functools.lru_cache(maxsize=16384)
def _scope_end(pattern: str, parts: tuple[str, ...]) -> int | None:
    """After how many components a pattern is first fulfilled; None if it never is."""
    anchored = pattern.startswith("/")
    globs = tuple(pattern.strip("/").split("/"))
    starts = (0,) if anchored else range(len(parts))
    ends = [end for start in starts for end in _ends(globs, parts, start)]
    return min((end for end in ends if end > 0), default=None)


def _ends(globs: tuple[str, ...], parts: tuple[str, ...], start: int) -> Iterator[int]:
    if not globs:
        yield start
    elif globs[0] == "**":
        for skip in range(start, len(parts) + 1):
            yield from _ends(globs[1:], parts, skip)
    elif start < len(parts) and fnmatchcase(parts[start], globs[0]):
        yield from _ends(globs[1:], parts, start + 1)


@dataclass(frozen=True)
class _ByFrame(_Grouping):
    """Groups of nodes that came of one execution of a piece of Python code.

    JAX keeps with each operation where every Python frame stood when it was bound. Operations of
    one execution stand together in the program and have the same frames outside of that code.
    Where it was executed several times in a row from one place, a frame that goes back tells
    where the next began, unless a loop in the code itself can have brought it back.
    """

    def _anchor(self, stack: Stack, known: dict[int, bool]) -> tuple[int, Any] | None:
        """Which frame of a node (innermost first) is the one meant, and what tells its kind.

        `known`: what was found out about code objects, by identity.
        """
        raise NotImplementedError

    def _is_named(self, node: Node) -> bool:
        return False

    _each_time_round = False  # whether the next turn of a loop in the code is a match of its own

    def _groups(self, graph: Graph, path: Path) -> dict[Node, Group]:
        groups: dict[Node, Group] = {}
        run: list[_Bound] = []
        last: Any = None
        known: dict[int, bool] = {}

        def finish() -> None:
            for members in self._split(run):
                group = (_short(members[0].inner[-1].code.co_qualname), [b.node for b in members])
                groups.update(dict.fromkeys(group[1], group))
            run.clear()

        for node in graph.nodes:
            stack = stack_of(node, graph, root=not path)
            anchor = self._anchor(stack, known)
            if anchor is None:
                finish()
                last = None
                if self._is_named(node):
                    groups[node] = (None, [node])
                continue
            index, kind = anchor
            key = (stack.key(index + 1), id(stack.codes[index]), kind)
            if key != last:
                finish()
            last = key
            run.append(_Bound(node, stack.frames(0, index + 1), stack.frames(index + 1)))
        finish()
        return groups

    def _split(self, run: Sequence[_Bound]) -> list[list[_Bound]]:
        """A run of nodes of the same code, cut where it began again."""
        if not run:
            return []
        level, may_loop = _deciding_level(run)
        executions = [[run[0]]]
        unsure: set[int] = set()  # of these it is not known whether they are new
        for before, now in itertools.pairwise(run):
            went_back = _went_back(before, now, level)
            if not went_back:
                executions[-1].append(now)
                continue
            if (may_loop or went_back == "in a loop") and not self._each_time_round:
                unsure.add(len(executions))
            executions.append([now])
        if not unsure or _are_independent(executions):
            return executions
        if not any(map(is_in_loop, run[0].outer)):  # then the loop is the code's own
            return _joined(executions, unsure)
        name = _short(run[0].inner[-1].code.co_qualname)
        raise GraphError(
            f"{self!r}: {name} is called in a loop and has a loop of its own, so that its calls "
            f"cannot be told apart from {Occurrence((), run[0].node)} on: put a jax.named_scope "
            "around each call and use match.scope"
        )


class _Bound(NamedTuple):
    """A node, its frames down to those of the code that is meant, and those around it."""

    node: Node
    inner: tuple[Frame, ...]  # innermost first; the last is that of the code itself
    outer: tuple[Frame, ...]


def _deciding_level(run: Sequence[_Bound]) -> tuple[int, bool]:
    """The outermost level (1: the code itself) at which the nodes' frames do not all stand at the
    same instruction, and whether one of those further out stands in a loop of its own."""
    may_loop = False
    for level in range(1, min(len(bound.inner) for bound in run) + 1):
        frames = {bound.inner[-level] for bound in run}
        if len(frames) > 1:
            return level, may_loop
        may_loop = may_loop or is_in_loop(frames.pop())
    return 0, may_loop


def _went_back(before: _Bound, now: _Bound, level: int) -> str:
    """Whether, at this level, execution stands further up than it did; ``""``: it does not."""
    if level == 0:
        return "again" if len(before.inner) == len(now.inner) else ""
    old, new = before.inner[-level], now.inner[-level]
    if old.code is not new.code or new.at >= old.at:
        return ""
    return "in a loop" if loops_between(new, old) else "again"


def _joined(executions: list[list[_Bound]], unsure: set[int]) -> list[list[_Bound]]:
    joined: list[list[_Bound]] = []
    for i, members in enumerate(executions):
        if i in unsure:
            joined[-1].extend(members)
        else:
            joined.append(list(members))
    return joined


def _are_independent(executions: Sequence[Sequence[_Bound]]) -> bool:
    """Whether none of these groups uses what another computes."""
    owner = {bound.node: i for i, members in enumerate(executions) for bound in members}
    for node, i in owner.items():
        for value in node.inputs:
            producer = getattr(value, "producer", None)
            if producer is not None and owner.get(producer, i) != i:
                return False
    return True


@dataclass(frozen=True)
class _CallOf(_ByFrame):
    def _anchor(self, stack: Stack, known: dict[int, bool]) -> tuple[int, Any] | None:
        for index in range(len(stack.codes) - 1, -1, -1):
            code = stack.codes[index]
            found = known.get(id(code))
            if found is None:
                found = known[id(code)] = _is_function(code.co_qualname, self.patterns_)
            if found:
                return index, None
        return None

    def _is_named(self, node: Node) -> bool:
        return bool(node.regions) and _is_function(node.name, self.patterns_)

    def names(self, graph: Graph) -> list[str]:
        found: dict[str, None] = {}
        for o in graph.walk():
            if o.node.regions:
                found[o.node.name] = None
            for code in stack_of(o.node, o.graph, root=not o.path).codes:
                found[_short(code.co_qualname)] = None
        return list(found)

    def __repr__(self) -> str:
        return f"match.call({', '.join(map(repr, self.patterns_))})"


@functools.lru_cache(maxsize=16384)
def _is_function(qualname: str, patterns: tuple[str, ...]) -> bool:
    names = {qualname, _short(qualname), qualname.rsplit(".", 1)[-1]}
    return any(_is_any(name, patterns) for name in names)


def _short(qualname: str) -> str:
    """A function's name within its module: without the functions around it, and a class for the
    call of its instances."""
    return qualname.rsplit("<locals>.", 1)[-1].removesuffix(".__call__")


@dataclass(frozen=True)
class _SourceOf(_ByFrame):
    _each_time_round = True

    def _anchor(self, stack: Stack, known: dict[int, bool]) -> tuple[int, Any] | None:
        for index, code in enumerate(stack.codes):
            if id(code) not in known:
                known[id(code)] = is_user_file(code.co_filename)
            if known[id(code)]:
                (frame,) = stack.frames(index, index + 1)
                kind = next((p for p in self.patterns_ if _is_place(frame, p)), None)
                return None if kind is None else (index, kind)
        return None

    def names(self, graph: Graph) -> list[str]:
        origins = [o.origin for o in graph.walk()]
        places = [name for o in origins if o is not None for name in (o.place, o.function)]
        return list(dict.fromkeys(places))

    def __repr__(self) -> str:
        return f"match.source({', '.join(map(repr, self.patterns_))})"


def _is_place(frame: Frame, pattern: str) -> bool:
    origin = Origin(frame.code.co_filename, frame.line, frame.code.co_qualname)
    if re.search(r":\d+$", pattern):
        file, line = pattern.rsplit(":", 1)
        return origin.line == int(line) and _is_file(origin, file)
    return _is_file(origin, pattern) or _is_function(origin.function, (pattern,))


def _is_file(origin: Origin, pattern: str) -> bool:
    short = origin.place.rsplit(":", 1)[0]
    file = origin.file.replace("\\", "/")
    return _is_any(short, (pattern,)) or file == pattern or file.endswith("/" + pattern)


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    # Not by fnmatch alone: `In[3]` is the name of a file in a notebook.
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
