"""What a rule of `tracegrad.rules` is: a name, a selector, and what is done at its matches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec

import jax
import numpy as np

from tracegrad.ir import Graph, Occurrence, Value, has_gradient
from tracegrad.ir.editing import around_each, behind_each, behind_inputs
from tracegrad.ir.parameters import Parameters
from tracegrad.ir.selector import Selector
from tracegrad.ir.stretches import refuse_references
from tracegrad.ir.wording import brief, name_of, shortened
from tracegrad.rewriting.edits import check_selector, matches_of, parameters_of

Edit = Callable[[Graph, Sequence[Occurrence]], Graph]
# identity(place): a function that hands on a value, with another tangent; `place`: a name for it.
Identity = Callable[[str], Callable[[Any], Any]]
P = ParamSpec("P")


@dataclass(frozen=True, repr=False, eq=False)
class MatchRule:
    """A rule: what it is called, the selector that says where, and what is done at the matches.

    `edit` gives another graph, edited at some occurrences in one; `identity` is what parameters
    are sent through, for a rule that takes `match.param`.

    Raises, when it is applied:
      NoMatchError: nothing matches (unless `missing_ok`).
      GraphError: a match lies in code that JAX has differentiated already, or inside of a custom
        gradient, where an edit would do nothing; or its nodes cannot be taken together.
    """

    name: str
    where: Selector | Parameters
    edit: Edit
    missing_ok: bool = False
    text: str | None = None  # of the arguments, where they are more than the selector
    identity: Identity | None = None

    def __post_init__(self) -> None:
        if self.identity is None or not self.of_parameters:
            check_selector(self.where)

    @property
    def of_parameters(self) -> bool:
        return isinstance(self.where, Parameters)

    def parameters_in(self, graph: Graph) -> dict[Value, str]:
        """The parameters of a graph at which it acts; none for a rule at operations."""
        if not isinstance(self.where, Parameters):
            return {}
        return parameters_of(self.where, graph, True, self)

    def __call__(self, graph: Graph) -> Graph:
        if isinstance(self.where, Parameters):
            assert self.identity is not None
            found = parameters_of(self.where, graph, self.missing_ok, self)
            return behind_inputs(graph, {v: self.identity(path) for v, path in found.items()})
        matches = matches_of(self.where, graph, self.missing_ok, self)
        return self.edit(graph, matches) if matches else graph

    def __repr__(self) -> str:
        room = "" if self.name == "edit" else "rules."
        return f"{room}{self.name}({_shown(self.where) if self.text is None else self.text})"


def shows_arguments(make: Callable[P, MatchRule]) -> Callable[P, MatchRule]:
    """Has each rule that a function makes show what the function was called with: the selector by
    position, the other arguments by name."""
    where, *_ = parameters = inspect.signature(make).parameters

    @functools.wraps(make)
    def shown(*args: P.args, **kwargs: P.kwargs) -> MatchRule:
        rule = make(*args, **kwargs)
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        texts = [f"{'' if name == where else f'{name}='}{_shown(x)}" for name, x in given.items()]
        return replace(rule, text=", ".join(texts))

    return shown


def _shown(argument: object) -> str:
    if isinstance(argument, Selector):
        # Two selectors that are combined stand in parentheses, as those of the call.
        return repr(argument)[1:-1] if repr(argument).startswith("(") else repr(argument)
    if isinstance(argument, jax.Array | np.ndarray):
        return brief(argument)
    return name_of(argument) if callable(argument) else shortened(repr(argument))


def of_arrays(edit: Edit) -> Edit:
    """An edit of the arrays that cross the border of a match.

    It raises GraphError if a match makes a Ref for others, or writes to one: what flows back by
    that would pass the edit by.
    """

    def of_matches(graph: Graph, matches: Sequence[Occurrence]) -> Graph:
        for match in matches:
            refuse_references(graph.region_of(match), match.nodes, match)
        return edit(graph, matches)

    return of_matches


def around(
    function: Callable[..., Any],
    depends_on: Callable[[Occurrence], Hashable] = lambda match: None,
) -> Edit:
    """What writes ``function(op, *operands)`` in the place of each match; see `around_each`."""
    return lambda graph, matches: around_each(graph, matches, function, depends_on=depends_on).graph


def behind(function: Callable[[Any], Any]) -> Edit:
    """What sends each float value that leaves a match through a function that returns it as it is;
    see `behind_each`."""
    return lambda graph, matches: (
        behind_each(graph, matches, lambda match: function, wanted=has_gradient).graph
    )
