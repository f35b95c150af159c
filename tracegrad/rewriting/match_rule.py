"""`MatchRule`, the class of the rules of `tracegrad.rules`: a name, a selector, and an edit."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec

import jax
import numpy as np

from tracegrad.ir import Graph, Occurrence, Value
from tracegrad.ir.editing import around_each, behind_inputs
from tracegrad.ir.node_groups import refuse_references
from tracegrad.ir.parameters import Parameters
from tracegrad.ir.selector import Selector
from tracegrad.ir.wording import brief, name_of, shortened
from tracegrad.rewriting.matches import (
    check_parameters,
    check_selector,
    find_matches,
    parameters_of,
)

Edit = Callable[[Graph, Sequence[Occurrence]], Graph]
# identity(path) returns an identity function with another tangent, for the parameter at this path.
Identity = Callable[[str], Callable[[Any], Any]]
P = ParamSpec("P")


@dataclass(frozen=True, repr=False, eq=False)
class MatchRule:
    """A rule: its name, the selector that finds its matches, and the edit at the matches.

    ``edit(graph, matches)`` returns the edited graph. A rule that selects parameters
    (`match.param`) passes each through the function ``identity(path)``. A rule whose function
    refuses forward mode also has ``outer_identity(path)``, for the parameters of an outer gradient
    (`apply_to_outer`): this function changes cotangents, but not tangents.

    A call of the rule raises:
      NoMatchError: nothing matches (unless `missing_ok`).
      GraphError: a match is in code that JAX has already differentiated or inside of a custom
        gradient, where an edit would do nothing; or its nodes cannot be grouped.
    """

    name: str
    where: Selector | Parameters
    edit: Edit
    missing_ok: bool = False
    text: str | None = None  # the arguments in the repr; None: the arguments of `made_by`
    identity: Identity | None = None
    outer_identity: Identity | None = None
    # The call that made the rule, to make it in another process; None: it cannot be repeated.
    made_by: functools.partial[MatchRule] | None = None

    def __post_init__(self) -> None:
        if self.identity is None or not isinstance(self.where, Parameters):
            check_selector(self.where)

    def parameters_in(self, graph: Graph) -> dict[Value, str]:
        """Returns the selected parameters of a graph with their paths; {} for a rule on
        operations."""
        if not isinstance(self.where, Parameters):
            return {}
        paths = parameters_of(graph).items()
        return {value: path for value, (path, alias) in paths if self.where.fits(path, alias)}

    def __call__(self, graph: Graph) -> Graph:
        if not isinstance(graph, Graph):
            raise TypeError(
                f"{self!r} is a rule for a Graph; it was given {brief(graph)}. For a function, "
                "write tracegrad.trace(fun, rules=rule) or tracegrad.rewrite(fun, rule)"
            )
        if isinstance(self.where, Parameters):
            parameters = self.parameters_in(graph)
            check_parameters(parameters, self.where, graph, self.missing_ok, self)
            return _apply_to_parameters(graph, parameters, self.identity)
        matches = find_matches(self.where, graph, self.missing_ok, self)
        return self.edit(graph, matches) if matches else graph

    def apply_to_outer(self, graph: Graph) -> Graph:
        """Applies the rule to a graph that takes derivatives to which the rule was applied.

        A rule for parameters acts on every gradient with respect to a parameter. In forward mode,
        the tangent of a gradient is the tangent of the gradient after the rule.
        """
        if not isinstance(self.where, Parameters):
            return self(graph)
        parameters = self.parameters_in(graph)
        check_parameters(parameters, self.where, graph, True, self)
        return _apply_to_parameters(graph, parameters, self.outer_identity or self.identity)

    @property
    def has_tangents(self) -> bool:
        """Whether the rule also acts on tangents with respect to parameters."""
        return self.outer_identity is None

    def __repr__(self) -> str:
        module = "" if self.name == "edit" else "rules."
        if self.text is not None or self.made_by is None:
            argument = _describe_argument(self.where) if self.text is None else self.text
            return f"{module}{self.name}({argument})"
        where, *_ = parameters = inspect.signature(self.made_by.func).parameters
        by_name = dict(zip(parameters, self.made_by.args, strict=False)) | self.made_by.keywords
        texts = [
            f"{'' if name == where else f'{name}='}{_describe_argument(x)}"
            for name, x in by_name.items()
        ]
        return f"{module}{self.name}({', '.join(texts)})"


def _apply_to_parameters(
    graph: Graph, paths: Mapping[Value, str], identity: Identity | None
) -> Graph:
    assert identity is not None
    return behind_inputs(graph, {value: identity(path) for value, path in paths.items()})


def shows_arguments(make: Callable[P, MatchRule]) -> Callable[P, MatchRule]:
    """Decorates a function that makes rules: the repr of a rule shows the function's arguments, the
    selector by position and the others by name."""

    @functools.wraps(make)
    def make_and_record(*args: P.args, **kwargs: P.kwargs) -> MatchRule:
        call = functools.partial(make_and_record, *args, **kwargs)
        return replace(make(*args, **kwargs), made_by=call)

    return make_and_record


def _describe_argument(argument: object) -> str:
    if isinstance(argument, Selector):
        return repr(argument)
    if isinstance(argument, jax.Array | np.ndarray):
        return brief(argument)
    return name_of(argument) if callable(argument) else shortened(repr(argument))


def refusing_refs(edit: Edit) -> Edit:
    """Makes an edit raise GraphError for the matches that `refuse_references` refuses."""

    def check_and_edit(graph: Graph, matches: Sequence[Occurrence]) -> Graph:
        for match in matches:
            refuse_references(graph.region_of(match), match.nodes, match)
        return edit(graph, matches)

    return check_and_edit


def edit_around(
    function: Callable[..., Any],
    depends_on: Callable[[Occurrence], Hashable] = lambda match: None,
) -> Edit:
    """Returns an edit that replaces each match with ``function(op, *operands)``, by
    `around_each`."""
    return lambda graph, matches: around_each(graph, matches, function, depends_on=depends_on).graph
