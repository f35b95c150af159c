"""Converts the options of users to numbers: a memory budget, and how many plans to compile."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import numpy as np

from tracegrad.planning.tuning import TUNING

MemoryBudget = int | float | str
Measure = bool | int

_UNITS = {"b": 1, "%": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_EXPECTED = (
    'a memory budget is bytes (an int, or a string like "2GiB", "800 MB"), or a share of the peak '
    'without recompute (a float above 0 and up to 1, or a string like "40%")'
)


def budget_bytes(budget: MemoryBudget, whole: int) -> int:
    """Returns the bytes of a budget; a share is a share of `whole` bytes.

    Raises TypeError for a budget of another type, and ValueError for a budget that is not above 0
    or cannot be parsed.

    >>> budget_bytes("2GiB", 0), budget_bytes("1.5 MB", 0), budget_bytes("40%", 1000)
    (2147483648, 1500000, 400)
    >>> budget_bytes(0.25, 1000), budget_bytes(4096, 0)
    (250, 4096)
    """
    if isinstance(budget, str):
        read = re.fullmatch(r"\s*([+-]?[\d_]*\.?\d+(?:e[+-]?\d+)?)\s*(%|[a-z]*)\s*", budget.lower())
        if read is not None and not read[2]:
            ways = f'"{read[1]}%", "{read[1]}MiB" or, for bytes, "{read[1]}B"'
            raise ValueError(f"{_EXPECTED}; {budget!r} has no unit: write {ways}")
        if read is None or read[2] not in _UNITS:
            raise ValueError(f"{_EXPECTED}; cannot read {budget!r}")
        number, unit = float(read[1]) / (100 if read[2] == "%" else 1), read[2]
    elif isinstance(budget, float | np.floating):
        number, unit = float(budget), "%"
    else:
        try:
            given: Any = None if isinstance(budget, bool) else budget
            number, unit = operator.index(given), "b"
        except TypeError:
            raise TypeError(f"{_EXPECTED}; got {budget!r}") from None
    size = number * (whole if unit == "%" else _UNITS[unit])
    wrong = ""
    if not number > 0 or not math.isfinite(size):
        wrong = "which is not above zero"
    elif unit == "%" and number > 1:
        wrong = "more than the whole peak"
        wrong += f". For bytes pass int({budget!r})" if not isinstance(budget, str) else ""
    elif unit != "%" and size < 1:
        wrong = f"less than a byte; {size:.0%} is a share"
    if wrong:
        raise ValueError(f"{_EXPECTED}; got {budget!r}, {wrong}")
    return max(1, int(size))


def plans_to_compile(measure: Measure) -> int:
    """Returns the maximum number of plans to compile: `measure`, two for True, none for False.
    Raises TypeError or ValueError if `measure` is not a number of plans."""
    if isinstance(measure, bool):
        return TUNING.plans if measure else 0
    expected = "measure= is True, False or how many plans to compile at most"
    if not hasattr(measure, "__index__"):
        raise TypeError(f"{expected}, not {measure!r}")
    if measure < 1:
        raise ValueError(f"{expected}, at least 1, not {measure!r}; False compiles nothing")
    return operator.index(measure)
