"""Makes samples and stopped values constants for `check_grads`, as derivatives treat them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from tracegrad.insight.comparisons import Checked
from tracegrad.ir import Graph, Occurrence, operations
from tracegrad.ir.authors import author_of
from tracegrad.ir.editing import Op, around_each
from tracegrad.ir.occurrence import at
from tracegrad.ir.wording import listed

STOP = "stop_gradient"  # its name in the argument `deliberate`
_IMPLICIT = "its derivative is that of the distribution, not of the algorithm that draws it"


def with_stops_held(
    program: Graph, stops: dict[Occurrence, Any]
) -> tuple[Graph, tuple[Checked, ...]]:
    """Replaces stopped values, or samples, by constants with their values in `stops`.

    Returns the program, and a deliberate `Checked` for each place. Removes them from `stops`; those
    that are left are in loops.
    """
    values = {}
    held = dict[str, Checked]()
    for found, value in list(stops.items()):
        if np.shape(value) == found.node.outputs[0].aval.shape:  # in a scan: one for each step
            values[found], nan = value, math.nan
            why = f", since {_IMPLICIT}" if is_sample(found) else ""
            said = "deliberate", found.origin, "", f"held constant{why}"
            held.setdefault(_stop(found), Checked(_name(found), 1, "", nan, nan, *said))
            del stops[found]

    def constant(op: Op, *operands: Any) -> Any:
        return jnp.asarray(values[op.match])

    edited = around_each(program, list(values), constant, depends_on=lambda match: match)
    return edited.graph, tuple(held.values())


def is_sample(found: Occurrence) -> bool:
    """Whether a node draws a sample that has an implicit derivative."""
    return found.node.op in operations.IMPLICIT


def without_verdict(check: Checked, sample: Occurrence) -> Checked:
    """Withdraws the verdict "wrong" from a comparison that may depend on a sample in a loop."""
    if check.status != "wrong" or check.note:
        return check
    note = f"it may depend on {_stop(sample)}: {_IMPLICIT}"
    return dataclasses.replace(check, status="none", got=math.nan, note=note)


def _name(found: Occurrence) -> str:
    if is_sample(found):
        return found.name
    author = author_of(found)
    return STOP if author == "yours" else f"{STOP} of {author}"


def _stop(found: Occurrence) -> str:
    return f"{_name(found)}{at(found.origin)}"


def hint_of(stops: Collection[Occurrence]) -> str:
    """Returns advice on stopped values, which vary in differences but not in derivatives."""
    if not stops:
        return ""
    return (
        "\nStopped values vary in finite differences, but are constants in derivatives: "
        f"{listed(list(dict.fromkeys(map(_stop, stops))), most=4)}. If that is intended, "
        f'deliberate="{STOP}" holds them constant, except in loops.'
    )
