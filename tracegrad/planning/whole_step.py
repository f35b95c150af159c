"""Compares a memory budget with the memory of a whole step, and warns if the step holds more.

A plan is for one gradient. In a step with two gradients, the values that the first gradient leaves
behind are alive while the second gradient runs. A second derivative keeps more values. A gradient
that was made outside of the step has no plan. Such a step is compiled as a whole; if XLA then
reports more bytes than the budget, the user gets a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracegrad.ir import Graph, Occurrence, scopes
from tracegrad.ir.occurrence import is_under_rules, warn_where_called
from tracegrad.ir.wording import in_units
from tracegrad.planning.compiled import NotMeasuredError
from tracegrad.planning.measuring import held_by_program


class BudgetWarning(UserWarning):
    """A step holds more than its memory budget, although each of its gradients fits the budget."""


def warn_if_larger(
    step: Graph, places: Iterable[Occurrence], budget: int, asked: object
) -> int | None:
    """Returns the bytes that XLA holds for a step; None, without compiling, if the plan of one
    gradient says all. Warns, at the user's line, if the bytes are more than the budget, or unknown.
    `places` are the nodes of the step, from `walk`; `asked` is the user's request, for the
    message."""
    why = _why_the_plan_falls_short(places)
    if not why:
        return None
    text = f"{asked!r} limits each gradient alone, and {step.name} {why}"
    try:
        held = held_by_program(step)
    except NotMeasuredError as error:
        warn_where_called(f"{text}: its bytes as a whole are not known ({error})", BudgetWarning)
        return None
    if held > budget:
        text += f": as a whole it holds {held:,} bytes ({in_units(held)}) beside arguments and "
        text += "results. Give a smaller budget, so that the step as a whole is within yours"
        warn_where_called(text, BudgetWarning)
    return held


def _why_the_plan_falls_short(places: Iterable[Occurrence]) -> str:
    is_backward = False  # whether the previous node belongs to a backward pass
    for place in places:
        stacks = [scopes.transformations(scopes.around(node)) for node in place.steps]
        stack = [name for names in stacks for name in names]
        if "jvp" not in stack:
            continue
        if not is_under_rules(place):
            return "has a gradient that was made outside of it"
        if any(map(_is_backward_moved, stacks)):
            return "differentiates a gradient"
        if is_backward and "transpose" not in stack:
            return "has several gradients"
        is_backward = "transpose" in stack
    return ""


def _is_backward_moved(names: Sequence[str]) -> bool:
    """Whether the transformations are forward mode over a backward pass."""
    forward = [k for k, name in enumerate(names) if name == "jvp" and "transpose" not in names[:k]]
    return bool(forward) and "transpose" in names[forward[0] :]
