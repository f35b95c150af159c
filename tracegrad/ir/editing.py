"""The editor of graphs: returns a graph with new code around matches, or after values.

Only the new code of an edit is traced, by `jax.make_jaxpr`. The operations around the new code are
not bound again, so they keep their scopes, settings, types and effects. New code defines the same
values as the replaced code, so the operations that read these values do not change. An edit costs
one trace of the new code, and one new program for each enclosing region; a region that is called
from several places is edited once if the edits in all its calls are equal.

New code may close over arrays, take arrays as further inputs of the graph (*taps*), or return
arrays as further outputs (*shown* arrays). Each such array crosses the borders of regions by a
*port* (`borders.py`).

Editing by a function around an operation is an idea of qwix (context-oriented interception), and
never changing a graph is an idea of penzai.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracegrad import _jax
from tracegrad.ir.borders import Edited, with_regions
from tracegrad.ir.draft import Draft
from tracegrad.ir.graph import Graph
from tracegrad.ir.node_groups import operands_of, values_leaving
from tracegrad.ir.nodes import Atom, Node, Value, renamed
from tracegrad.ir.occurrence import Fragment, Occurrence, Path
from tracegrad.ir.program_keys import operations_key
from tracegrad.ir.writing import Place, Port, Surroundings, write, write_first, write_through


@dataclass(frozen=True, eq=False)
class Op:
    """The matched operations as a function of their operands, for the code around a match.

    The code may call ``op(*operands)`` any number of times; a call returns the result, or a list of
    several results.

    Attributes:
      params: the parameters of the primitive; empty if the match is several operations.
      taps: further inputs of the graph, of the types that the edit asked for.
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
        with _jax.at_own_lines():
            return _jax.eval_program(self.program, operands)

    def __call__(self, *operands: Any) -> Any:
        results = self.results(*operands)
        return results[0] if len(results) == 1 else results

    def show(self, array: Any) -> None:
        """Makes an array a further output of the graph: see `Edited.outs`."""
        self.shown.append(array)

    def __repr__(self) -> str:
        return f"<Op {self.match}>"


# around(op, *operands) returns the new results of a match.
WritesAround = Callable[..., Any]
# behind(match)(value) returns the replacement of a value that leaves a match. Users of the value
# outside of the match read the replacement.
WritesBehind = Callable[[Occurrence], Callable[..., Any]]
# Returns the types of the taps of a match: see `Op.taps`.
Taps = Callable[[Any], Sequence[Any]]


def _depends_on_nothing(match: Occurrence) -> None:
    """The `depends_on` of an edit that is the same at all matches."""


def around_each(
    graph: Graph,
    matches: Sequence[Occurrence],
    around: WritesAround,
    *,
    taps: Taps = lambda match: (),
    depends_on: Callable[[Occurrence], Hashable] | None = None,
) -> Edited:
    """Replaces each match with ``around(op, *operands)``.

    Args:
      graph, matches: the matches were found in this graph, or in a graph from which edits made this
        graph.
      around: returns one value for each result of the match, of the same type. A match of one
        operation has the operation's operands, in their order. The operands of a match of several
        operations are the values that enter the match, and its results are the values that leave
        the match.
      taps: returns the types of the arrays in ``op.taps``, which become inputs of the graph.
      depends_on: returns a hashable key of a match. `around` may use only the key and the
        operations of a match. Two calls of one region share an edit only if the keys of their
        matches are equal. Matches of the same operations at the same lines with equal keys share
        the trace of `around`. Without `depends_on`, calls of one region share edits, and no two
        edits share a trace.

    Returns:
      The graph and its ports. The inputs for taps come last, and so do the outputs for shown
      arrays.

    Raises GraphError for a wrong number or type of results, for matches that overlap, for a match
    that is not convex (a value leaves the match and comes back), and for a value that has to cross
    the border of a region that cannot take further inputs or outputs.
    """
    traced: dict[Any, Any] = {}

    def write_at(draft: Draft, nodes: Sequence[Node], match: Occurrence) -> None:
        members = draft.now_of(nodes, match)
        single = None if isinstance(match, Fragment) else members[0]
        if single is None:
            draft.gather(members, match)
        operands: list[Atom] = list(single.inputs) if single else [*operands_of(members)]
        results = list(single.outputs) if single else values_leaving(draft.graph, members)
        inner = [Value(atom.aval) for atom in operands]
        scope = _jax.common_scope([node.source.info for node in members])
        matched = [node.equation for node in members]
        matched = [e.replace(source_info=_jax.below_scope(scope, e.source_info)) for e in matched]
        if single:
            equations = [matched[0].replace(invars=inner)]
        else:
            inside: dict[Any, Atom] = dict(zip(operands, inner, strict=True))
            equations = [e.replace(invars=renamed(e.invars, inside)) for e in matched]
        program = _jax.program_of(
            draft.graph.program, constants={}, inputs=inner, outputs=results, equations=equations
        )
        count = len(operands)
        shown: list[Any] = []

        def run(*args: Any) -> list[Any]:
            op = Op(match, tuple(members), program, args[count:], shown)
            return _to_list(around(op, *args[:count]))

        place = members[0], match, draft.surroundings
        key = depends_on and (depends_on(match), operations_key(matched, operands, results))
        new = write(
            run,
            operands,
            results,
            *place,
            scope=scope,
            shared=key and (key, traced),
            taps=taps(match),
            shown=shown,
        )
        draft.replace(members, new, match)

    return _edit_matches(graph, matches, write_at, depends_on or _depends_on_nothing)


def behind_each(
    graph: Graph,
    matches: Sequence[Occurrence],
    behind: WritesBehind,
    *,
    selects: Callable[[Value], bool] = lambda value: True,
    tapped: bool = False,
    depends_on: Callable[[Occurrence], Hashable] = _depends_on_nothing,
) -> Edited:
    """Replaces each value that leaves a match with ``behind(match)(value)``, outside of the match.

    The nodes of the match itself go on using the value. The match need not be convex.

    Args:
      behind: ``behind(match)`` returns a function; the function takes the value (and, if `tapped`,
        a tap of the value's type) and returns an array of the value's type.
      selects: whether to replace a value; by default all values are replaced.
      tapped: whether the function gets a tap for each value.

    Returns, raises: as `around_each`.
    """

    traced: dict[Any, Any] = {}

    def write_at(draft: Draft, members: Sequence[Node], match: Occurrence) -> None:
        makers = {value: node for node in members for value in node.outputs}
        for value in values_leaving(draft.graph, members):
            if selects(value):
                inner = Value(value.aval)  # the value inside the match
                draft.rename(members, {value: inner})
                types = [value.aval] if tapped else []
                place = makers[value], match, draft.surroundings
                new = write_through(behind(match), inner, value, *place, traced, taps=types)
                draft.insert(new, behind=makers[value])

    return _edit_matches(graph, matches, write_at, depends_on)


def behind_inputs(graph: Graph, behind: Mapping[Value, Callable[[Any], Any]]) -> Graph:
    """Replaces inputs with ``behind[value](value)``, for all their users."""
    new = {value: Value(value.aval) for value in behind}
    nodes: list[Node] = []
    constants = dict(graph.constants)
    names: dict[Value, Atom] = dict(new)
    traced: dict[Any, Any] = {}
    for value, run in behind.items():
        written = write_first(run, value, new[value], graph, traced)
        nodes += written.nodes
        constants |= written.constants
        constants |= {port.value: port.closed_over for port in written.ins}
        names |= written.names
    return graph.replace(
        nodes=[*nodes, *(node.with_renamed_operands(names) for node in graph.nodes)],
        outputs=renamed(graph.outputs, names),
        constants=constants,
    )


def show_each(graph: Graph, matches: Sequence[Occurrence]) -> Edited:
    """Adds an output to the graph for each array that leaves a match."""

    def show_at(draft: Draft, members: Sequence[Node], match: Occurrence) -> None:
        for value in values_leaving(draft.graph, members):
            shown = value
            if value not in draft.graph.users and value not in draft.graph.results:
                shown = Value(value.aval)  # an unused result is a DropVar, which is no output
                draft.rename(members, {value: shown})
            draft.outs.append(Port((match.key,), shown))

    return _edit_matches(graph, matches, show_at, lambda match: match)


def by_match(
    matches: Sequence[Occurrence], ports: Sequence[Port], arrays: Sequence[Any]
) -> list[list[Any]]:
    """Returns, for each match, the arrays of its ports."""
    found: dict[Place, list[Any]] = {place_of(match): [] for match in matches}
    for port, array in zip(ports, arrays, strict=True):
        found[port.place].append(array)
    return [found[place_of(match)] for match in matches]


def _to_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


# ------------------------------------------------------------------------------- region by region

_WriteAt = Callable[["Draft", Sequence[Node], Occurrence], None]


def _edit_matches(
    graph: Graph,
    matches: Sequence[Occurrence],
    write_at: _WriteAt,
    depends_on: Callable[[Occurrence], Hashable],
) -> Edited:
    """Edits a graph with ``write_at(draft, nodes, match)`` at each match; adds inputs for taps,
    outputs for shown arrays (both in the order of the matches) and constants."""
    places = [(match.path, match) for match in matches]
    edited = _edit_region(graph, places, write_at, depends_on, Surroundings(), {})
    inner = edited.graph
    closed_over = {p.value: p.closed_over for p in edited.ins if p.closed_over is not None}
    taps = [port for port in edited.ins if port.closed_over is None]
    if not closed_over and not taps and not edited.outs:
        return Edited(graph=inner)
    order = {place_of(match): i for i, match in enumerate(matches)}

    def position(port: Port) -> int:
        return order[port.place]

    taps, outs = sorted(taps, key=position), sorted(edited.outs, key=position)
    whole = inner.replace(
        inputs=[*inner.inputs, *(port.value for port in taps)],
        outputs=[*inner.outputs, *(port.value for port in outs)],
        constants={**inner.constants, **closed_over},
    )
    return Edited(graph=whole, ins=taps, outs=outs)


def place_of(match: Occurrence) -> Place:
    """Returns the `Port.place` of a match, from the root graph."""
    return (*((node.key, name) for node, name in match.path), match.key)


def _edit_region(
    graph: Graph,
    places: Sequence[tuple[Path, Occurrence]],
    write_at: _WriteAt,
    depends_on: Callable[[Occurrence], Hashable],
    surroundings: Surroundings,
    cache: dict[Any, Edited],
) -> Edited:
    """Edits a region at `places`: pairs of the path from the region to a match, and the match.
    `cache` has the regions edited so far, by the region and the edits in it."""
    key: tuple[Any, ...] = (
        graph,
        surroundings,
        *(
            (
                *((node.key, name) for node, name in path),
                *(node.key for node in match.nodes),
                depends_on(match),
            )
            for path, match in places
        ),
    )
    if key in cache:
        return cache[key]
    draft = Draft(graph, surroundings)
    below: dict[Node, dict[str, list[tuple[Path, Occurrence]]]] = {}
    for path, match in places:
        if path:
            (node, name), rest = path[0], path[1:]
            caller = draft.node_of(node, match)
            below.setdefault(caller, {}).setdefault(name, []).append((rest, match))
    for node, by_region in below.items():
        edits = {
            name: _edit_region(
                node.region(name), inner, write_at, depends_on, surroundings.inside(node), cache
            )
            for name, inner in by_region.items()
        }
        draft.replace([node], with_regions(node, edits, surroundings))
    for path, match in places:
        if not path:
            write_at(draft, draft.nodes_of(match), match)
    cache[key] = draft.finished()
    return cache[key]
