"""`MatchRule`, the class of the rules of `tracegrad.rules`: a name, a selector, and an edit."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
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
from tracegrad.rewriting.edits import (
    check_parameters,
    check_selector,
    matches_of,
    parameters_of,
)

Edit = Callable[[Graph, Sequence[Occurrence]], Graph]
# identity(place): an identity function with another tangent, to put at a place of this name.
Identity = Callable[[str], Callable[[Any], Any]]
P = ParamSpec("P")


@dataclass(frozen=True, repr=False, eq=False)
class MatchRule:
    """A rule: its name, the selector that finds its matches, and the edit at the matches.

    ``edit(graph, matches)`` returns the edited graph. For parameters (`match.param`), a parameter
    passes through the function ``identity(path)``. If that function refuses forward mode,
    ``identity_again(path)`` is a function that does not change tangents.

    A call of the rule raises:
      NoMatchError: nothing matches (unless `missing_ok`).
      GraphError: a match is in code that JAX has already differentiated or inside of a custom
        gradient, where an edit would do nothing; or its nodes cannot be grouped.
    """

    name: str
    where: Selector | Parameters
    edit: Edit
    missing_ok: bool = False
    text: str | None = None  # the arguments in the repr; None: those of `made_by`
    identity: Identity | None = None
    identity_again: Identity | None = None
    # Makes the rule again, in another process; None: the repr shows the selector alone.
    made_by: functools.partial[MatchRule] | None = None

    def __post_init__(self) -> None:
        if self.identity is None or not self.of_parameters:
            check_selector(self.where)

    @property
    def of_parameters(self) -> bool:
        return isinstance(self.where, Parameters)

    def parameters_in(self, graph: Graph) -> dict[Value, str]:
        """Empty for a rule on operations."""
        if not isinstance(self.where, Parameters):
            return {}
        known = parameters_of(graph).items()
        return {value: names[0] for value, names in known if self.where.fits(*names)}

    def __call__(self, graph: Graph) -> Graph:
        if not isinstance(graph, Graph):
            raise TypeError(
                f"{self!r} is a rule for a Graph; it was given {brief(graph)}. For a function, "
                "write tracegrad.trace(fun, rules=rule) or tracegrad.rewrite(fun, rule)"
            )
        if isinstance(self.where, Parameters):
            found = self.parameters_in(graph)
            check_parameters(found, self.where, graph, self.missing_ok, self)
            return _apply_to_parameters(graph, found, self.identity)
        matches = matches_of(self.where, graph, self.missing_ok, self)
        return self.edit(graph, matches) if matches else graph

    def apply_to_outer(self, graph: Graph) -> Graph:
        """Applies the rule to a graph that takes derivatives to which the rule was applied.

        A rule for parameters acts on every gradient with respect to a parameter. In forward mode,
        the tangent of a gradient is the tangent of the gradient after the rule.
        """
        if not isinstance(self.where, Parameters):
            return self(graph)
        found = self.parameters_in(graph)
        check_parameters(found, self.where, graph, True, self)
        return _apply_to_parameters(graph, found, self.identity_again or self.identity)

    @property
    def has_tangents(self) -> bool:
        """Whether the rule also acts on tangents with respect to parameters."""
        return self.identity_again is None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.made_by is None else (self.made_by, ())

    def __repr__(self) -> str:
        room = "" if self.name == "edit" else "rules."
        if self.text is not None or self.made_by is None:
            argument = _describe_argument(self.where) if self.text is None else self.text
            return f"{room}{self.name}({argument})"
        where, *_ = parameters = inspect.signature(self.made_by.func).parameters
        given = {**dict(zip(parameters, self.made_by.args, strict=False)), **self.made_by.keywords}
        texts = [
            f"{'' if name == where else f'{name}='}{_describe_argument(x)}"
            for name, x in given.items()
        ]
        return f"{room}{self.name}({', '.join(texts)})"


def _apply_to_parameters(
    graph: Graph, found: Mapping[Value, str], identity: Identity | None
) -> Graph:
    assert identity is not None
    return behind_inputs(graph, {value: identity(path) for value, path in found.items()})


def shows_arguments(make: Callable[P, MatchRule]) -> Callable[P, MatchRule]:
    """Decorates a function that makes rules: the repr of a rule shows the function's arguments, the
    selector by position and the others by name; and pickling a rule stores these arguments."""

    @functools.wraps(make)
    def shown(*args: P.args, **kwargs: P.kwargs) -> MatchRule:
        again = functools.partial(shown, *args, **kwargs)
        return replace(make(*args, **kwargs), made_by=again)

    return shown


def _describe_argument(argument: object) -> str:
    if isinstance(argument, Selector):
        return repr(argument)
    if isinstance(argument, jax.Array | np.ndarray):
        return brief(argument)
    return name_of(argument) if callable(argument) else shortened(repr(argument))


def of_arrays(edit: Edit) -> Edit:
    """Makes an edit raise GraphError if a match makes a Ref that other operations use, or writes to
    one: gradients that flow through the Ref would bypass the edit."""

    def of_matches(graph: Graph, matches: Sequence[Occurrence]) -> Graph:
        for match in matches:
            refuse_references(graph.region_of(match), match.nodes, match)
        return edit(graph, matches)

    return of_matches


def around(
    function: Callable[..., Any],
    depends_on: Callable[[Occurrence], Hashable] = lambda match: None,
) -> Edit:
    """Returns an edit that replaces each match with ``function(op, *operands)``, by
    `around_each`."""
    return lambda graph, matches: around_each(graph, matches, function, depends_on=depends_on).graph


def behind(function: Callable[[Any], Any]) -> Edit:
    """Returns an edit that passes each float value that leaves a match through an identity, by
    `behind_each`."""
    return lambda graph, matches: (
        behind_each(graph, matches, lambda match: function, selects=has_gradient).graph
    )
