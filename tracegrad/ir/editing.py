"""The one editor of graphs: it writes code around matches, or behind values, into another graph.

Only what an edit writes is traced, by `jax.make_jaxpr`. What stands around it is not bound again,
so its scopes, settings, types and effects stay what they were. Written code defines the same values
as the code that it replaces, so the operations that read those values stay as they are. An edit
costs what it writes, and one new program for each region on the way to it; a region that is entered
from several places and edited alike there is edited once.

Written code may close over arrays, be given arrays by further inputs (taps), or show arrays by
further outputs; each such array crosses the borders of regions by a *port* (`borders.py`).

The idea of editing by a function around an operation is that of context-oriented interception, as
qwix has it; that of never changing a graph is penzai's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracegrad import _jax
from tracegrad.ir.borders import Edited, with_regions
from tracegrad.ir.draft import Draft
from tracegrad.ir.graph import Graph
from tracegrad.ir.nodes import Atom, Node, Value, renamed
from tracegrad.ir.occurrence import Fragment, Occurrence, Path
from tracegrad.ir.stretches import entering, leaving
from tracegrad.ir.writing import Place, Port, Where, write, write_first


@dataclass(frozen=True, eq=False)
class Op:
    """What code around a match is given: the matched operations as a function of their operands.

    Call it as often as you like: ``op(*operands)`` is the result, or a list of several.

    Attributes:
      match: the match, with its name, scope and source line.
      params: the parameters of the primitive, where the match is one operation.
      taps: arrays that come from outside, of the types that were asked for.
    """

    match: Occurrence
    nodes: tuple[Node, ...]
    program: Any
    taps: Sequence[Any] = ()
    shown: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.match.name

    @property
    def params(self) -> Mapping[str, Any]:
        return {} if isinstance(self.match, Fragment) else self.nodes[0].params

    def results(self, *operands: Any) -> list[Any]:
        """The results on these operands, as a list."""
        with _jax.outside_of_scopes():  # its operations have theirs
            return _jax.eval_program(self.program, operands)

    def __call__(self, *operands: Any) -> Any:
        results = self.results(*operands)
        return results[0] if len(results) == 1 else results

    def show(self, array: Any) -> None:
        """Leads an array out of the program: see `Edited.outs`."""
        self.shown.append(array)

    def __repr__(self) -> str:
        return f"<Op {self.match}>"


# around(op, *operands): what stands for the results of a match.
WritesAround = Callable[..., Any]
# behind(match)(value): what stands for a value that leaves a match, to all but the match.
WritesBehind = Callable[[Occurrence], Callable[..., Any]]
# The types of the arrays that are given from outside, at a match or behind a value.
Taps = Callable[[Any], Sequence[Any]]


def around_each(
    graph: Graph,
    matches: Sequence[Occurrence],
    around: WritesAround,
    *,
    taps: Taps = lambda match: (),
    depends_on: Callable[[Occurrence], Hashable] = lambda match: None,
) -> Edited:
    """The graph with ``around(op, *operands)`` in the place of each match.

    Args:
      graph, matches: the matches were found in this graph, or in one that it was made from.
      around: gives as many values as the match has results, of their types. The operands of one
        operation are all of its operands; of several operations the values that enter them, and
        the results those that leave them.
      taps: the types of arrays that `around` is given as ``op.taps``; they become inputs.
      depends_on: a hashable key of a match; two calls of one region share an edit only if the
        keys of their matches are equal.

    Returns:
      The graph, and its ports: inputs for taps come last, as do outputs for what is shown.

    Raises GraphError for other numbers or types of results, for matches that overlap, for a match
    with a way out of it and back into it, and for values that no region on their way can pass.
    """

    def write_at(draft: Draft, nodes: Sequence[Node], match: Occurrence) -> None:
        members = draft.now_of(nodes, match)
        one = None if isinstance(match, Fragment) else members[0]
        if one is None:
            draft.gather(members, match)
        operands: list[Atom] = list(one.inputs) if one else [*entering(members)]
        results = list(one.outputs) if one else leaving(draft.graph, members)
        inner = [Value(atom.aval) for atom in operands]
        if one:
            equations = [one.equation.replace(invars=inner)]
        else:
            inside: dict[Any, Atom] = dict(zip(operands, inner, strict=True))
            equations = [node.reading(inside).equation for node in members]
        program = _jax.program_of(
            draft.graph.program, constants={}, inputs=inner, outputs=results, equations=equations
        )
        count = len(operands)
        shown: list[Any] = []

        def run(*args: Any) -> list[Any]:
            op = Op(match, tuple(members), program, args[count:], shown)
            return _flat(around(op, *args[:count]))

        place = members[0], match, draft.where
        new = write(run, operands, results, *place, taps=taps(match), shown=shown)
        draft.replace(members, new, match)

    return _edit(graph, matches, write_at, depends_on)


def behind_each(
    graph: Graph,
    matches: Sequence[Occurrence],
    behind: WritesBehind,
    *,
    wanted: Callable[[Value], bool] = lambda value: True,
    tapped: bool = False,
    depends_on: Callable[[Occurrence], Hashable] = lambda match: None,
) -> Edited:
    """The graph with ``behind(match)(value)`` in the place of each value that leaves a match, for
    all that uses the value but the match itself. A match need not hang together for that.

    Args:
      behind: ``behind(match)`` returns a function; the function takes the value (and, if they are
        `tapped`, a tap of the value's type) and returns an array of the value's type.
      wanted: which values are meant.
      tapped: whether `behind` is given a tap for each value.

    Returns, raises: as `around_each`.
    """

    def write_at(draft: Draft, members: Sequence[Node], match: Occurrence) -> None:
        makers = {value: node for node in members for value in node.outputs}
        for value in leaving(draft.graph, members):
            if wanted(value):
                own = Value(value.aval)
                draft.rename(members, {value: own})
                types = [value.aval] if tapped else []
                run = functools.partial(_called, behind(match))
                maker = makers[value]
                new = write(run, [own], [value], maker, match, draft.where, taps=types)
                draft.insert(new, behind=maker)

    return _edit(graph, matches, write_at, depends_on)


def before_each(
    graph: Graph,
    matches: Sequence[Occurrence],
    before: Callable[[Any], Any],
    chosen: Callable[[Graph, Occurrence, Sequence[Atom]], Sequence[int]],
) -> Graph:
    """The graph with ``before(operand)`` in the place of some operands of each match.

    `chosen`: ``chosen(region, match, operands)`` returns the positions of the operands that
    `before` replaces.
    """

    def write_at(draft: Draft, members: Sequence[Node], match: Occurrence) -> None:
        one = None if isinstance(match, Fragment) else members[0]
        operands: Sequence[Atom] = one.inputs if one else entering(members)
        new: dict[int, Atom] = {}
        for place in chosen(draft.graph, match, operands):
            result = Value(operands[place].aval)
            run = functools.partial(_called, before)
            written = write(run, [operands[place]], [result], members[0], match, draft.where)
            draft.insert(written, before=members[0])
            new[place] = written.names.get(result, result)
        if one:
            draft.operands[one.key] = [new.get(i, atom) for i, atom in enumerate(operands)]
        else:
            draft.rename(members, {operands[i]: value for i, value in new.items()})

    return _edit(graph, matches, write_at, lambda match: None).graph


def behind_inputs(graph: Graph, behind: Mapping[Value, Callable[[Any], Any]]) -> Graph:
    """The graph with ``behind[value](value)`` in the place of some of its inputs."""
    new = {value: Value(value.aval) for value in behind}
    nodes: list[Node] = []
    constants = dict(graph.constants)
    names: dict[Value, Atom] = dict(new)
    for value, run in behind.items():
        written = write_first(run, value, new[value], graph)
        nodes += written.nodes
        constants |= written.constants
        names |= written.names
    return graph.replace(
        nodes=[*nodes, *(node.reading(names) for node in graph.nodes)],
        outputs=renamed(graph.outputs, names),
        constants=constants,
    )


def shown_behind(graph: Graph, matches: Sequence[Occurrence]) -> Edited:
    """The graph with an output for each array that leaves a match."""

    def show_at(draft: Draft, members: Sequence[Node], match: Occurrence) -> None:
        for value in leaving(draft.graph, members):
            shown = value
            if value not in draft.graph.users and value not in draft.graph.results:
                shown = Value(value.aval)  # JAX drops a result that nobody uses
                draft.rename(members, {value: shown})
            draft.outs.append(Port((match.node.key,), shown))

    return _edit(graph, matches, show_at, lambda match: match)


def _called(run: Callable[..., Any], *args: Any) -> list[Any]:
    return _flat(run(*args))


def _flat(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


# ------------------------------------------------------------------------------- region by region

_WriteAt = Callable[["Draft", Sequence[Node], Occurrence], None]


def _edit(
    graph: Graph,
    matches: Sequence[Occurrence],
    write_at: _WriteAt,
    depends_on: Callable[[Occurrence], Hashable],
) -> Edited:
    places = [(match.path, match) for match in matches]
    edited = _edit_region(graph, places, write_at, depends_on, Where(), {})
    inner = edited.graph
    closed_over = {p.value: p.closed_over for p in edited.ins if p.closed_over is not None}
    taps = [port for port in edited.ins if port.closed_over is None]
    order = {place_of(match): i for i, match in enumerate(matches)}

    def position(port: Port) -> int:
        return order[port.place]

    taps, outs = sorted(taps, key=position), sorted(edited.outs, key=position)
    if not closed_over and not taps and not outs:
        return Edited(graph=inner)
    whole = inner.replace(
        inputs=[*inner.inputs, *(port.value for port in taps)],
        outputs=[*inner.outputs, *(port.value for port in outs)],
        constants={**inner.constants, **closed_over},
    )
    return Edited(graph=whole, ins=taps, outs=outs)


def place_of(match: Occurrence) -> Place:
    """What the ports of a match are known by: see `Port.place`."""
    return (*((node.key, name) for node, name in match.path), match.node.key)


def _edit_region(
    graph: Graph,
    places: Sequence[tuple[Path, Occurrence]],
    write_at: _WriteAt,
    depends_on: Callable[[Occurrence], Hashable],
    where: Where,
    known: dict[Any, Edited],
) -> Edited:
    """Edits a region at places: (path from here, match)."""
    key: tuple[Any, ...] = (
        graph,
        where,
        *(
            (
                *((node.key, name) for node, name in path),
                *(node.key for node in match.nodes),
                depends_on(match),
            )
            for path, match in places
        ),
    )
    if key in known:
        return known[key]
    draft = Draft(graph, where)
    below: dict[Node, dict[str, list[tuple[Path, Occurrence]]]] = {}
    for path, match in places:
        if path:
            (node, name), rest = path[0], path[1:]
            here = draft.node_of(node, match)
            below.setdefault(here, {}).setdefault(name, []).append((rest, match))
    for node, by_region in below.items():
        edits = {
            name: _edit_region(
                node.region(name), inner, write_at, depends_on, where.inside(node), known
            )
            for name, inner in by_region.items()
        }
        draft.replace([node], with_regions(node, edits, where))
    for path, match in places:
        if not path:
            write_at(draft, draft.nodes_of(match), match)
    known[key] = draft.finished()
    return known[key]
