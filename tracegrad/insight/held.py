"""What `check_grads` holds as it is: differences go through it, and the derivative does not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from tracegrad.insight.comparisons import Checked
from tracegrad.ir import Graph, Occurrence, operations
from tracegrad.ir.authors import whose
from tracegrad.ir.editing import Op, around_each
from tracegrad.ir.occurrence import at
from tracegrad.ir.wording import listed

STOP = "stop_gradient"  # as `deliberate` names it
_IMPLICIT = "its derivative is that of the distribution, not of how it was drawn"


def hold(program: Graph, stops: dict[Occurrence, Any]) -> tuple[Graph, tuple[Checked, ...]]:
    """The program with what it stops, or samples, as it is now; where that is. What is left is in
    loops."""
    values = {}
    held = dict[str, Checked]()
    for found, value in list(stops.items()):
        if np.shape(value) == found.node.outputs[0].aval.shape:  # in a scan there is one a step
            values[found], nan = value, math.nan
            why = f", since {_IMPLICIT}" if is_sample(found) else ""
            said = "deliberate", found.origin, "", f"held as it is{why}"
            held.setdefault(_stop(found), Checked(_name(found), 1, "", nan, nan, *said))
            del stops[found]

    def constant(op: Op, *operands: Any) -> Any:
        return jnp.asarray(values[op.match])

    edited = around_each(program, list(values), constant, depends_on=lambda match: match)
    return edited.graph, tuple(held.values())


def is_sample(found: Occurrence) -> bool:
    """Whether a node draws a number that has an implicit derivative."""
    return found.node.op in operations.IMPLICIT


def without_verdict(check: Checked, sample: Occurrence) -> Checked:
    """A comparison that may be wrong for a sample that is not held."""
    if check.status != "wrong" or check.note:
        return check
    note = f"it may go through {_stop(sample)}, and {_IMPLICIT}"
    return dataclasses.replace(check, status="none", got=math.nan, note=note)


def _name(found: Occurrence) -> str:
    if is_sample(found):
        return found.name
    author = whose(found)
    return STOP if author == "yours" else f"{STOP} of {author}"


def _stop(found: Occurrence) -> str:
    return f"{_name(found)}{at(found.origin)}"


def hint_of(stops: Collection[Occurrence]) -> str:
    """What to do about what differences go through, and derivatives do not."""
    if not stops:
        return ""
    return (
        "\nDifferences go through what is stopped, derivatives do not: "
        f"{listed(list(dict.fromkeys(map(_stop, stops))), most=4)}. If that is meant, "
        f'deliberate="{STOP}" holds it as it is, but in loops.'
    )
