"""Extracts intermediate values and cotangents of a loss that a traced function differentiates.

The program of a train step that calls `jax.grad` has the forward and backward passes of the loss. A
selector can no longer find the operations of the loss there. So a rule in force marks the loss
before it is differentiated. A mark is an identity operation on a value that leaves a match. For a
value, the mark is in the forward pass; for a gradient, there is one mark in the forward pass and
one mark in the backward pass. Marks stay in the traced program. When the step has been traced, the
results of the marks become outputs of the program.
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
from tracegrad.ir.selector import Selector
from tracegrad.ir.stretches import leaving, refuse_references
from tracegrad.rewriting.edits import matches_of, place_name
from tracegrad.tracing.in_force import RuleSet, in_force

# Parameters of a mark: `place` is the number of the match; `index` the number of the value among
# the values that leave the match; `what` is `_VALUE`, `_COTANGENT` (the cotangent of a value),
# `_DIFFERENTIATED` (a value that is differentiated) or `_CONSTANT` (a value that is not).
_MARK = _jax.identity_primitive("mark")
_CUSTOM_VJP = _jax.CUSTOM_VJP.name
_VALUE, _COTANGENT, _DIFFERENTIATED, _CONSTANT = "value", "cotangent", "differentiated", "constant"


@dataclass(frozen=True)
class Shown:
    """A marked value or cotangent in a traced program.

    Attributes:
      at: the operation that returns the value or cotangent; the value's operation if `is_zero`.
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
        matches = matches_of(self._where, graph, True, self)
        places = {match: len(self._places) + i for i, match in enumerate(matches)}
        for match in matches:
            region = graph.region_of(match)
            values = leaving(region, match.nodes)
            if self._gradients:
                refuse_references(region, match.nodes, match)
                values = [value for value in values if has_gradient(value)]
            self._places.append((place_name(match), str(match), len(values)))
        identity = _mark_cotangent if self._gradients else _mark_value
        wanted = has_gradient if self._gradients else lambda value: True

        def marking(match: Occurrence) -> Callable[[Any], Any]:
            return identity(places[match], next(numbers[match]))

        numbers = {match: itertools.count() for match in matches}
        # Each call gets marks of its own, since a backward pass may have the calls in another
        # order, or only some of them.
        return behind_each(
            graph, matches, marking, selects=wanted, depends_on=lambda match: match
        ).graph

    def __repr__(self) -> str:
        name = "intermediate_gradients" if self._gradients else "intermediates"
        return f"{name}({self._where!r})"

    def trace(self, trace: Callable[[], Graph]) -> Graph:
        with in_force(RuleSet([self])):
            return trace()

    def shown(self, program: Graph) -> list[tuple[str, list[Shown]]]:
        """Returns the name of each match, and the values that leave the match, once for each call.
        Raises GraphError for a match whose gradient the program does not compute."""
        found = _find_marks(program)
        if not self._gradients:
            kinds = [(_VALUE, False)]
        else:
            kinds = [(_COTANGENT, False), (_DIFFERENTIATED, True), (_CONSTANT, True)]
        answer = []
        for place, (name, text, count) in enumerate(self._places):
            ways: list[list[Shown]] = []
            is_computed = not count
            for index in range(count):
                here = [
                    [Shown(at, is_zero) for at in found.get((what, place, index), ())]
                    for what, is_zero in kinds
                ]
                ways.append(next(filter(None, here), []))
                # Some values of a match (statistics beside activations) may be constant. All of
                # them constant is an error.
                is_computed |= not here[-1] or ways[-1] is not here[-1]
            if self._gradients and not is_computed:
                raise GraphError(_not_computed_message(self, text))
            # No item if the program does not contain the match; several if it is called repeatedly.
            for all_of_one in zip(*ways, strict=False):
                answer.append((name, list(all_of_one)))
        return answer


def _find_marks(program: Graph) -> dict[tuple[str, int, int], list[Occurrence]]:
    """In order of execution."""
    found: dict[tuple[str, int, int], list[Occurrence]] = {}
    for occurrence in program.walk():
        if occurrence.node.primitive is _MARK:
            what, place, index = (occurrence.node.params[k] for k in ("what", "place", "index"))
            if what == _CONSTANT and occurrence.path and occurrence.path[-1][0].op == _CUSTOM_VJP:
                # The mark is inside of a custom_vjp call that was not differentiated. Only results
                # of the call can be read, so use the call itself.
                occurrence = Occurrence(occurrence.path[:-1], occurrence.path[-1][0])
            # Skip a value that is recomputed in the backward pass: the first one is the same.
            is_again = any(map(scopes.is_backward, occurrence.steps))
            if what == _COTANGENT or not is_again:
                found.setdefault((what, place, index), []).append(occurrence)
    return found


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
