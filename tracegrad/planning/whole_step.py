"""A memory budget beside what the whole step holds.

A plan is for one gradient. A step with two gradients holds what one leaves behind while the other
runs. A second derivative keeps more values. So does a gradient that was made outside of the step:
no plan has seen it. Such a step is compiled as it will be run, and what
XLA says that it holds is told if it is more than the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracegrad.ir import Graph, Occurrence, scopes
from tracegrad.ir.occurrence import is_under_rules, warn_where_called
from tracegrad.ir.wording import in_units
from tracegrad.planning.compiled import NotMeasuredError
from tracegrad.planning.measuring import held_by_program


class BudgetWarning(UserWarning):
    """A step holds more than its memory budget, which each of its gradients keeps by itself."""


def warn_if_larger(
    step: Graph, places: Iterable[Occurrence], budget: int, asked: object
) -> int | None:
    """The bytes that a step of several gradients holds, if it was compiled for them. Warns, at the
    user's line, if they are more than a budget.

    `places`: of the step, from `walk`; `asked`: what the user has asked for."""
    why = _why_the_plan_falls_short(places)
    if not why:
        return None
    text = f"{asked!r} limits each gradient alone, and {step.name} {why}"
    try:
        held = held_by_program(step)
    except NotMeasuredError as error:
        warn_where_called(f"{text}: what it holds as a whole is not known ({error})", BudgetWarning)
        return None
    if held > budget:
        text += f": as a whole it holds {held:,} bytes ({in_units(held)}) beside arguments and "
        text += "results. Give a smaller budget, so that the step as a whole is within yours"
        warn_where_called(text, BudgetWarning)
    return held


def _why_the_plan_falls_short(places: Iterable[Occurrence]) -> str:
    """Why a step holds more than the plan of its gradient says; "" if it does not."""
    is_backward = False  # at the place before
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
    """Whether the transformations around a node are forward mode over a backward pass."""
    forward = [k for k, name in enumerate(names) if name == "jvp" and "transpose" not in names[:k]]
    return bool(forward) and "transpose" in names[forward[0] :]
