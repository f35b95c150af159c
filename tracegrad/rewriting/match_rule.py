"""What a rule of `tracegrad.rules` is: a name, a selector, and what is done at its matches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from tracegrad.ir import Graph, Occurrence
from tracegrad.ir.selector import Selector
from tracegrad.rewriting.edits import Edit, check_selector, edited, matches_of


@dataclass(frozen=True, repr=False, eq=False)
class MatchRule:
    """A rule: what it is called, the selector that says where, and what is done at the matches.

    `edit` gives a copy of a graph that is edited at some occurrences in it; see `at_each`.

    Raises, when it is applied:
      NoMatchError: nothing matches (unless `missing_ok`).
      GraphError: a match lies in code that JAX has differentiated already, or inside of a custom
        gradient, where an edit would do nothing; or its nodes cannot be taken together.
    """

    name: str
    where: Selector
    edit: Callable[[Graph, Sequence[Occurrence]], Graph]
    missing_ok: bool = False
    text: str | None = None  # of the selector, where it is more than what was given

    def __post_init__(self) -> None:
        check_selector(self.where)

    def __call__(self, graph: Graph) -> Graph:
        matches = matches_of(self.where, graph, self.missing_ok, self)
        return self.edit(graph, matches) if matches else graph

    def __repr__(self) -> str:
        text = repr(self.where) if self.text is None else self.text
        # Two selectors that are combined stand in parentheses already.
        return f"rules.{self.name}{text}" if text.startswith("(") else f"rules.{self.name}({text})"


def at_each(
    edit: Edit, depends_on: Callable[[Occurrence], Hashable] = lambda match: None
) -> Callable[[Graph, Sequence[Occurrence]], Graph]:
    """What edits the nodes of one match, for each match in the order of execution; `depends_on` as
    of `edited`."""
    return functools.partial(edited, edit=edit, depends_on=depends_on)
