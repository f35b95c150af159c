"""Values and cotangents of what a function differentiates itself, led out of the whole program.

A train step that calls `jax.grad` holds what is left of its loss: forward and backward passes, in
which no operation can be told any more. So the loss is marked before it is differentiated, where
the rules in force are applied to it: an operation that hands on its operand stands at each place,
one in the forward pass and one in the backward pass, and stays in whatever program comes of that.
When the step has been traced, what is marked is found and led out as other values are.
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
from tracegrad.tracing.in_force import Force, in_force

# Its parameters: `place` numbers the matches, `index` the values of one; `what` is one of these: a
# value; the cotangent that arrives at one; a value that is differentiated; one that is not.
_MARK = _jax.identity_primitive("mark")
_RULE = _jax.CUSTOM_VJP.name
_VALUE, _COTANGENT, _DIFFERENTIATED, _CONSTANT = "value", "cotangent", "differentiated", "constant"


@dataclass(frozen=True)
class Shown:
    """A value or cotangent in a traced program.

    Attributes:
      at: the operation that gives it.
      is_zero: whether it is zeros of that type: no cotangent arrives there.
    """

    at: Occurrence
    is_zero: bool = False


class Marks:
    """A rule that marks what leaves each match in the functions that are differentiated.

    Args:
      gradients: whether the cotangents are wanted; else the values are.
    """

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
        identity = _with_cotangent if self._gradients else _with_value
        wanted = has_gradient if self._gradients else lambda value: True

        def marking(match: Occurrence) -> Callable[[Any], Any]:
            return identity(places[match], next(numbers[match]))

        numbers = {match: itertools.count() for match in matches}
        # A mark for each call: a backward pass has calls in another order, and some of them.
        return behind_each(
            graph, matches, marking, wanted=wanted, depends_on=lambda match: match
        ).graph

    def __repr__(self) -> str:
        name = "intermediate_gradients" if self._gradients else "intermediates"
        return f"{name}({self._where!r})"

    def trace(self, trace: Callable[[], Graph]) -> Graph:
        """The graph of a function, with marks in what it differentiates."""
        with in_force(Force([self])):
            return trace()

    def shown(self, program: Graph) -> list[tuple[str, list[Shown]]]:
        """What is marked in a program, in order: the name of each match, and what leaves it.

        Raises GraphError for a match whose gradient the program does not compute.
        """
        found = _found(program)
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
                # Of some that leave one match (statistics beside activations) it may be constant.
                is_computed |= not here[-1] or ways[-1] is not here[-1]
            if self._gradients and not is_computed:
                raise GraphError(_not_computed(self, text))
            # Not one if what was traced has become no part of the program; many if it is called.
            for all_of_one in zip(*ways, strict=False):
                answer.append((name, list(all_of_one)))
        return answer


def _found(program: Graph) -> dict[tuple[str, int, int], list[Occurrence]]:
    """Where each mark is in a program, in order of execution."""
    found: dict[tuple[str, int, int], list[Occurrence]] = {}
    for occurrence in program.walk():
        if occurrence.node.primitive is _MARK:
            what, place, index = (occurrence.node.params[k] for k in ("what", "place", "index"))
            if what == _CONSTANT and occurrence.path and occurrence.path[-1][0].op == _RULE:
                # Still inside of the rule that was not needed, which nothing leaves but results.
                occurrence = Occurrence(occurrence.path[:-1], occurrence.path[-1][0])
            # What is computed again for the backward pass is what it was.
            is_again = any(map(scopes.is_backward, occurrence.steps))
            if what == _COTANGENT or not is_again:
                found.setdefault((what, place, index), []).append(occurrence)
    return found


def _not_computed(rule: object, match: str) -> str:
    return (
        f"{rule!r}: the function differentiates with respect to nothing that {match} depends on, "
        "so that the gradient which would arrive there is not computed. Leave it out of the "
        "selector, or ask for the intermediate_gradients of the loss itself"
    )


def _with_value(place: int, index: int) -> Callable[[Any], Any]:
    return lambda value: _MARK.bind(value, what=_VALUE, place=place, index=index)


def _with_cotangent(place: int, index: int) -> Callable[[Any], Any]:
    def mark(value: Any, what: str) -> Any:
        return _MARK.bind(value, what=what, place=place, index=index)

    return _jax.with_cotangent(
        functools.partial(mark, what=_COTANGENT),
        forward=functools.partial(mark, what=_DIFFERENTIATED),
        run=functools.partial(mark, what=_CONSTANT),
    )
