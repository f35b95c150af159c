"""Extracts intermediate values and cotangents of a loss that a traced function differentiates.

The program of a train step that calls `jax.grad` has the forward and backward passes of the loss. A
selector can no longer find the operations of the loss there. So a rule in force marks the loss
before it is differentiated. A mark is an identity operation on a value that leaves a match. For
`intermediates`, the mark is in the forward pass; for `intermediate_gradients`, there is one mark in
the forward pass and one mark in the backward pass. Marks stay in the traced program. When the step
has been traced, the results of the marks become outputs of the program.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tracegrad import _jax
from tracegrad.ir import Graph, GraphError, Occurrence, has_gradient, scopes
from tracegrad.ir.editing import behind_each
from tracegrad.ir.node_groups import refuse_references, values_leaving
from tracegrad.ir.selector import Selector
from tracegrad.rewriting.edits import find_matches, place_name
from tracegrad.tracing.in_force import RuleSet, in_force

# Parameters of a mark: `place` is the number of the match; `index` the number of the value among
# the values that leave the match; `what` is `_VALUE`, `_COTANGENT` (the cotangent of a value),
# `_DIFFERENTIATED` (a value with a tangent) or `_CONSTANT` (a value without a tangent).
_MARK = _jax.identity_primitive("mark")
_CUSTOM_VJP = _jax.CUSTOM_VJP.name
_VALUE, _COTANGENT, _DIFFERENTIATED, _CONSTANT = "value", "cotangent", "differentiated", "constant"


@dataclass(frozen=True)
class Shown:
    """A marked value or cotangent in a traced program.

    Attributes:
      at: the operation that returns the value or cotangent (if `is_zero`, the value).
      is_zero: whether no cotangent arrives; then the cotangent is zeros of the value's type.
    """

    at: Occurrence
    is_zero: bool = False


class Marks:
    """A rule that marks the values that leave each match, in functions that are differentiated.
    With `gradients`, marks their cotangents instead."""

    def __init__(self, where: Selector, gradients: bool):
        self._where, self._gradients = where, gradients
        self._places: list[tuple[str, str, int]] = []  # name, text and number of values

    def __call__(self, graph: Graph) -> Graph:
        matches = find_matches(self._where, graph, True, self)
        places = {match: len(self._places) + i for i, match in enumerate(matches)}
        for match in matches:
            region = graph.region_of(match)
            values = values_leaving(region, match.nodes)
            if self._gradients:
                refuse_references(region, match.nodes, match)
                values = [value for value in values if has_gradient(value)]
            self._places.append((place_name(match), str(match), len(values)))
        identity = _mark_cotangent if self._gradients else _mark_value
        selects = has_gradient if self._gradients else lambda value: True
        indices = {match: itertools.count() for match in matches}

        def mark_next(match: Occurrence) -> Callable[[Any], Any]:
            return identity(places[match], next(indices[match]))

        # Each call of a region gets other marks, since a backward pass may have the calls in
        # another order, or only some of them.
        return behind_each(
            graph, matches, mark_next, selects=selects, depends_on=lambda match: match
        ).graph

    def __repr__(self) -> str:
        name = "intermediate_gradients" if self._gradients else "intermediates"
        return f"{name}({self._where!r})"

    def trace(self, trace: Callable[[], Graph]) -> Graph:
        with in_force(RuleSet([self])):
            return trace()

    def find_shown(self, program: Graph) -> list[tuple[str, list[Shown]]]:
        """Returns the name of each match, and the values that leave the match, once for each call.
        Raises GraphError for a match whose gradient the program does not compute."""
        marks = _find_marks(program)
        if not self._gradients:
            kinds = [(_VALUE, False)]
        else:
            kinds = [(_COTANGENT, False), (_DIFFERENTIATED, True), (_CONSTANT, True)]
        by_match = []
        for place, (name, text, count) in enumerate(self._places):
            values: list[list[Shown]] = []  # for each value of the match, its mark in each call
            is_computed = not count
            for index in range(count):
                by_kind = [
                    [Shown(at, is_zero) for at in marks.get((what, place, index), ())]
                    for what, is_zero in kinds
                ]
                values.append(next(filter(None, by_kind), []))
                # Some values of a match (statistics beside activations) may be constant. All of
                # them constant is an error.
                is_computed |= not by_kind[-1] or values[-1] is not by_kind[-1]
            if self._gradients and not is_computed:
                raise GraphError(_not_computed_message(self, text))
            # No item if the program does not contain the match; several if it is called repeatedly.
            by_match += [(name, list(values_of_call)) for values_of_call in zip(*values)]
        return by_match


def _find_marks(program: Graph) -> dict[tuple[str, int, int], list[Occurrence]]:
    """Returns the marks in order of execution, by their parameters ``(what, place, index)``."""
    marks: dict[tuple[str, int, int], list[Occurrence]] = {}
    for occurrence in program.walk():
        if occurrence.node.primitive is _MARK:
            what, place, index = (occurrence.node.params[k] for k in ("what", "place", "index"))
            if what == _CONSTANT and occurrence.path and occurrence.path[-1][0].op == _CUSTOM_VJP:
                # The mark is inside of a custom_vjp call that was not differentiated. Only results
                # of the call can become outputs, so use the call itself.
                occurrence = Occurrence(occurrence.path[:-1], occurrence.path[-1][0])
            # Skip a value that the backward pass recomputes: the forward pass has the same value.
            is_recomputed = any(map(scopes.is_backward, occurrence.steps))
            if what == _COTANGENT or not is_recomputed:
                marks.setdefault((what, place, index), []).append(occurrence)
    return marks


def _not_computed_message(rule: object, match: str) -> str:
    return (
        f"{rule!r}: {match} does not depend on anything that the function differentiates with "
        "respect to, so its gradient is not computed. Exclude the match from the selector, or "
        "request the intermediate_gradients of the loss itself"
    )


def _mark_value(place: int, index: int) -> Callable[[Any], Any]:
    return lambda value: _MARK.bind(value, what=_VALUE, place=place, index=index)


def _mark_cotangent(place: int, index: int) -> Callable[[Any], Any]:
    def mark(value: Any, what: str) -> Any:
        return _MARK.bind(value, what=what, place=place, index=index)

    return _jax.with_cotangent(
        functools.partial(mark, what=_COTANGENT),
        forward=functools.partial(mark, what=_DIFFERENTIATED),
        run=functools.partial(mark, what=_CONSTANT),
    )
