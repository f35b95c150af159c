"""Compares a memory budget with the memory of a whole step, and warns if the step holds more.

A plan is for one gradient. In a step with two gradients, the values that the first gradient leaves
behind are alive while the second gradient runs. A second derivative saves more values than its plan
counts. A gradient that was traced outside of the step has no plan. Such a step is compiled as a
whole; if XLA then reports more bytes than the budget, the user gets a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracegrad.ir import Graph, Occurrence, scopes
from tracegrad.ir.occurrence import is_under_rules, warn_where_called
from tracegrad.ir.wording import in_units
from tracegrad.planning.compiled import NotMeasuredError
from tracegrad.planning.measuring import held_by_program


class BudgetWarning(UserWarning):
    """A step exceeds its memory budget, or may exceed it: the bytes of the step are unknown."""


def warn_if_step_exceeds_budget(
    step: Graph, occurrences: Iterable[Occurrence], budget: int, request: object
) -> None:
    """Compiles a step, unless one plan covers it. Warns, at the user's line, if XLA holds more
    bytes for the step than the budget, or if the bytes are unknown.

    `occurrences` are all nodes of the step; `request` is the user's request, for the message.
    """
    reason = _why_one_plan_is_not_enough(occurrences)
    if not reason:
        return
    text = f"{request!r} limits each gradient alone, and {step.name} {reason}"
    try:
        held = held_by_program(step)
    except NotMeasuredError as error:
        warn_where_called(f"{text}: the whole step's bytes are unknown ({error})", BudgetWarning)
        return
    if held > budget:
        text += f": the whole step holds {held:,} bytes ({in_units(held)}) beside arguments and "
        text += (
            f"results. Give a smaller budget, until the whole step holds at most {budget:,} bytes"
        )
        warn_where_called(text, BudgetWarning)


def _why_one_plan_is_not_enough(occurrences: Iterable[Occurrence]) -> str:
    """Returns the reason in the words of the warning, or an empty text if one plan covers the step.
    JAX names the transformations of a node: "jvp" in both passes of a gradient, "transpose" in the
    backward pass alone."""
    was_backward = False  # whether the last node of a gradient was in its backward pass
    for occurrence in occurrences:
        stacks = [scopes.transformations(scopes.around(node)) for node in occurrence.steps]
        stack = [name for names in stacks for name in names]
        if "jvp" not in stack:
            continue
        if not is_under_rules(occurrence):
            return "has a gradient that was made outside of it"
        if any(map(_is_forward_over_backward, stacks)):
            return "differentiates a gradient"
        if was_backward and "transpose" not in stack:
            return "has several gradients"
        was_backward = "transpose" in stack
    return ""


def _is_forward_over_backward(names: Sequence[str]) -> bool:
    """Whether the outermost derivative is a JVP of a backward pass."""
    derivatives = [name for name in names if name in ("jvp", "transpose")]
    return derivatives[:1] == ["jvp"] and "transpose" in derivatives
