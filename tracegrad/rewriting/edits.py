"""Editing a graph at the matches of a selector, wherever in it they lie.

A rule gives back an edited copy. Regions on the way to a match are copied, once for all the calls
that are edited alike: where a function is called forty times and every call matches, the copy is
shared by the forty as the original was.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from tracegrad import _jax
from tracegrad.ir import (
    CustomGradient,
    Fragment,
    Graph,
    GraphError,
    Literal,
    Node,
    Occurrence,
    Origin,
    Value,
    grouping,
    scopes,
)
from tracegrad.ir.authors import code_of_rule
from tracegrad.ir.errors import NoMatchError
from tracegrad.ir.frames import CHANGES_GRADIENT
from tracegrad.ir.occurrence import Path, is_of_nothing, is_own_file, is_under_rules
from tracegrad.ir.selector import Selector

# Edits a graph at some nodes of it, which an occurrence in the original has become.
Edit = Callable[[Graph, Sequence[Node], Occurrence], None]


def check_selector(where: object) -> None:
    """Raises TypeError for what does not say where in a program."""
    if not isinstance(where, Selector):
        raise TypeError(
            f"expected a selector (tracegrad.match.op, match.call, ...) to say where; got {where!r}"
        )


def matches_of(
    where: Selector, graph: Graph, missing_ok: bool, asked: object, *, gradients: bool = True
) -> list[Occurrence]:
    """The matches of a selector at which a rule acts.

    Args:
      where, graph: what is looked for, and in what.
      missing_ok: whether there may be none.
      asked: what is looked for by, for messages.
      gradients: whether it is about gradients. Then those matches are left out that no gradient
        passes, and that lie in a loss to which `tracegrad.grad` and its like have applied the rules
        in force already.

    Raises:
      NoMatchError: there is none, and that is not allowed.
      GraphError: one lies in a custom gradient, in a solve or, about gradients, in code that JAX
        has differentiated already.
    """
    matches = where.look(graph).matches
    if gradients:
        matches = [m for m in matches if not (is_under_rules(m) or is_of_nothing(m))]
    for match in matches:
        if match.path:
            _refuse_inside_of_rules(match, asked)
        if gradients:
            refuse_differentiated(match, asked)
    if not matches and not missing_ok:
        raise NoMatchError(lambda: _no_match(graph, where, asked))
    return matches


def _no_match(graph: Graph, where: Selector, rule: object) -> str:
    around = getattr(where, "where", where)
    if around is not where and (there := around.look(graph).matches):
        _refuse_inside_of_rules(there[0], rule)
        return (
            f"{rule!r} concerns nothing in {graph.name}: {there[0]} matches, and is neither an "
            "operation element by element with a derivative that may be infinite, nor a custom "
            "gradient that the rule takes. For others there is rules.override_gradient; a rule "
            "that may concern nothing is given missing_ok=True"
        )
    names = where.names(graph)
    near: dict[str, None] = {}
    for pattern in where.patterns:
        lowered = {name.lower(): name for name in names}
        close = difflib.get_close_matches(pattern.lower(), lowered, 3, cutoff=0.4)
        near.update((lowered[name], None) for name in close)
    nearest = list(near)[:3] or names[:3]
    hint = f" The nearest names: {', '.join(map(repr, nearest))}." if nearest else ""
    return (
        f"{rule!r} matches nothing in {graph.name}: no {where!r}.{hint} See what there is with "
        "print(tracegrad.graph(fun)(*args)), try a selector with .find(selector); a rule that may "
        "match nothing is given missing_ok=True"
    )


def refuse_differentiated(
    match: Occurrence, rule: object, of_loss: str = "tracegrad.rewrite(loss, rule)"
) -> None:
    """Raises GraphError for what JAX has differentiated, naming where; `of_loss` is what to
    differentiate instead."""
    for node in match.steps:
        if "jvp" in scopes.transformations(scopes.around(node)):
            raise GraphError(
                f"{rule!r}: {match} lies in code that JAX has differentiated already"
                f"{_grad_call(node)}, where an edit of gradients would do nothing. The rules of an "
                "enclosing trace reach tracegrad.grad, and jax.grad and the like where they are "
                "looked up in jax while it runs (`import jax` rather than `from jax import grad`, "
                "and inside of the traced function). Or give it to the loss: "
                f"jax.grad({of_loss})"
            )


# The file of JAX's transformations: others of its files have functions of the same names.
_JAX_API = inspect.unwrap(_jax.grad).__code__.co_filename
_TRANSFORMS = {"grad", "value_and_grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize"}


def _grad_call(node: Node) -> str:
    """Where the user's code called `jax.grad` or the like, innermost."""
    assert node.source is not None
    name = ""
    for frame in _jax.frames(node.source.info):
        if is_own_file(frame.file_name):
            function = frame.function_name.split(".")[0]
            if function in _TRANSFORMS and frame.file_name == _JAX_API:
                name = function
        elif name:
            place = Origin(frame.file_name, frame.line_num, frame.function_name)
            return f" (by jax.{name} at {place})"
    return ""


def _refuse_inside_of_rules(match: Occurrence, rule: object) -> None:
    """Raises GraphError for what lies in the primal of a custom gradient or in a solve."""
    node = match.rule_around
    if isinstance(node, CustomGradient) and code_of_rule(node) in CHANGES_GRADIENT:
        raise GraphError(
            f"{rule!r}: {match} lies inside of {node.name}, which an earlier rule matches and "
            "gives a gradient of its own: of the two the outer rule is taken, and the edit would "
            "vanish. Leave out the outer rule, or what is in it: "
            f"& ~match.call({node.name!r})"
        )
    if isinstance(node, CustomGradient):
        raise GraphError(
            f"{rule!r}: {match} lies inside of the custom gradient {node.name}, whose rule "
            "replaces the derivative of all that is in it: the edit would vanish. Match "
            f"the call itself, match.call({node.name!r}), or leave it out: "
            f"& ~match.call({node.name!r})"
        )
    if node is None:
        return
    whole = (
        f"Match the whole, match.op({node.op!r}), or leave out what is in it: "
        "& ~match.where(lambda found: found.rule_around)"
    )
    if node.op == _jax.OF_AN_OBJECT:
        raise GraphError(
            f"{rule!r}: {match} lies inside of {node.name}, whose derivative JAX has for the "
            f"whole: the edit would vanish. {whole}"
        )
    raise GraphError(
        f"{rule!r}: {match} lies inside of a solve of {node.name}, whose derivative JAX takes by a "
        f"further solve: the edit would vanish. {whole}"
    )


def edited(
    graph: Graph,
    matches: Sequence[Occurrence],
    edit: Edit,
    depends_on: Callable[[Occurrence], Hashable] = lambda match: None,
) -> Graph:
    """A copy of a graph, edited at some occurrences in it.

    `depends_on`: what of a match its edit depends on, beside the nodes. Calls of one region for
    which that differs get copies of their own.
    """
    new = graph.copy()
    places = [(match.path, match) for match in matches]
    _edit_region(graph, new, places, edit, depends_on, {})
    return new


def _edit_region(
    old: Graph,
    new: Graph,
    places: Sequence[tuple[Path, Occurrence]],
    edit: Edit,
    depends_on: Callable[[Occurrence], Hashable],
    built: dict[Any, Graph],
) -> None:
    """Edits `new`, a copy of `old`, at the places (given by their paths from here)."""
    below: dict[tuple[Node, str], list[tuple[Path, Occurrence]]] = {}
    for path, match in places:
        if path:
            below.setdefault(path[0], []).append((path[1:], match))
    for (node, name), inner in below.items():
        region = node.region(name)
        key = (region, tuple((path, match.nodes, depends_on(match)) for path, match in inner))
        holder = new.node_here(node)
        if key in built:
            new.set_region(holder, name, built[key])
            continue
        built[key] = copy = region.copy()
        new.set_region(holder, name, copy)
        _edit_region(region, copy, inner, edit, depends_on, built)
    taken: dict[Node, Occurrence] = {}
    for path, match in places:
        if not path:
            edit(new, [_still_here(new, node, match, taken) for node in match.nodes], match)
            taken.update(dict.fromkeys(match.nodes, match))


def _still_here(
    graph: Graph, node: Node, match: Occurrence, taken: Mapping[Node, Occurrence]
) -> Node:
    try:
        return graph.node_here(node)
    except GraphError:
        if node not in taken:
            raise
        raise GraphError(
            f"{match} has operations in common with {taken[node]}, which matches too and stands in "
            "their place now. Narrow the selector so that no two matches overlap, or give two "
            "rules, that for the smaller matches first"
        ) from None


# ------------------------------------------------------------------- what crosses a match's border


def leaving(graph: Graph, nodes: Sequence[Node]) -> list[Value]:
    """The arrays by which others, or the graph's outputs, use nodes of it; of a single node all."""
    values = nodes[0].outputs if len(nodes) == 1 else grouping.leaving(graph, nodes)
    return [value for value in values if not value.is_reference]


def hand_out(graph: Graph, nodes: Sequence[Node], value: Value, new: Value | Literal) -> None:
    """Has all that uses a value, but the nodes of the match that it leaves, use a new one.

    What arrives at the match from outside of it is what an edit of the new one's cotangent sees;
    what nodes of the match send to each other is theirs.
    """
    members = set(nodes)
    graph.replace_uses(value, new, where=lambda user: user not in members)


def of_arrays(edit: Edit) -> Edit:
    """An edit of what crosses the border of a match.

    It raises GraphError if a match makes a Ref for others, or writes to one: what flows back by
    that would pass the edit by.
    """

    def of_nodes(graph: Graph, nodes: Sequence[Node], match: Occurrence) -> None:
        refuse_references(graph, nodes, match)
        edit(graph, nodes, match)

    return of_nodes


def refuse_references(graph: Graph, nodes: Sequence[Node], match: Occurrence) -> None:
    """Raises GraphError for a match that makes a Ref for others, or writes to one of them."""
    if not any(node.has_references for node in nodes):
        return
    if any(value.is_reference for value in grouping.leaving(graph, nodes)) or any(
        value.is_reference and node.op != _READ for node, value in grouping.taken(nodes)
    ):
        raise GraphError(
            f"{match} makes a jax.Ref or writes to one, by which gradients flow past any rule for "
            "it. Match all that uses the Ref together (a call, a scope), or leave this out: "
            "& ~match.where(lambda found: any(node.has_references for node in found.nodes))"
        )


_READ = "get"  # of an array out of a Ref


def place_name(match: Occurrence) -> str:
    """The scope of a match and its name: ``encoder/block_0/softmax``."""
    stacks = map(scopes.around, match.steps)
    mark = (scopes.UNDER_RULES, False)
    texts = (scopes.text([each for each in stack if each != mark]) for stack in stacks)
    scope = "/".join(filter(None, texts))
    parts = tuple(match.name.split("/"))
    names = tuple(name for name in match.scopes if name != scopes.UNDER_RULES)
    if isinstance(match, Fragment) and names[: len(parts)] == parts:
        return match.name  # of a scope that is the scope itself
    return f"{scope}/{match.name}" if scope else match.name


def place_names(matches: Sequence[Occurrence]) -> list[str]:
    """The names of all matches, made different."""
    return made_different([place_name(match) for match in matches])


def made_different(names: Sequence[str]) -> list[str]:
    """The first of each name as it is, further ones with a number that makes no other: ``sin``,
    ``sin_1``."""
    taken, number = set(names), dict.fromkeys(names, 0)
    different: dict[str, None] = {}
    for name in names:
        unique = name
        while unique in different or (unique != name and unique in taken):
            number[name] += 1
            unique = f"{name}_{number[name]}"
        different[unique] = None
    return list(different)
