"""Which custom rules give something else than the derivative of their function, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tracegrad.insight.explaining.observed import Observed
from tracegrad.insight.explanation import Finding, number_text
from tracegrad.ir import Occurrence


def changed_rules(observed: Observed) -> Iterator[Finding]:
    for found, i, given, own, difference in _differences(observed):
        yield Finding(
            "changed by a rule",
            f"the rule of {found.node.name} gives input {i} a gradient of norm "
            f"{number_text(given)}; the derivative of the function has {number_text(own)}, the "
            f"difference {number_text(difference)}",
            (),
            origin=found.origin,
            problem=False,
            cure="check it by `check_grads`, or declare it deliberate there",
            operation=found.node.name,
            occurrence=found,
        )


def _differences(observed: Observed) -> Iterator[tuple[Occurrence, int, float, float, float]]:
    """The user's rules that give something else than the derivative of their function: where, for
    which operand, and the norms of what they give, of the derivative and of the difference."""
    for rule, i, stat in observed.of("rule"):
        norms = np.asarray(stat, np.float64).reshape(-1, 4)
        norms = norms[~np.isnan(norms).any(axis=1)]
        given, own, difference, incoming = map(float, np.sqrt(np.sum(norms**2, axis=0)))
        # What cancels leaves rounding errors, in proportion to what came in.
        limit = 1e-3 * max(given, own) + 1e-5 * incoming
        if all(map(math.isfinite, (given, own, difference))) and difference > limit:
            yield rule, i, given, own, difference
