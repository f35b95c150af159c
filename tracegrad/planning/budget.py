"""A memory budget as users write it → bytes."""

from __future__ import annotations

import math
import operator
import re

import numpy as np

MemoryBudget = int | float | str

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_EXPECTED = (
    'a memory budget is bytes (an int, or a string like "2GiB", "800 MB"), or a share of the peak '
    'without recompute (a float above 0 and up to 1, or a string like "40%")'
)


def budget_bytes(budget: MemoryBudget, whole: int) -> int:
    """The bytes that a budget stands for.

    Args:
      budget: bytes as an int, or as a string with a unit (B, kB, KiB, MB, MiB, GB, GiB, TB, TiB);
        or a share: a float above 0 and up to 1, or a string with ``%``.
      whole: what a share is a share of, bytes.

    Raises:
      TypeError: it is of another type.
      ValueError: it is not above 0, or cannot be read.

    >>> budget_bytes("2GiB", 0), budget_bytes("1.5 MB", 0), budget_bytes("40%", 1000)
    (2147483648, 1500000, 400)
    >>> budget_bytes(0.25, 1000), budget_bytes(4096, 0)
    (250, 4096)
    """
    if isinstance(budget, bool):
        raise TypeError(f"{_EXPECTED}; got {budget!r}")
    given: object = budget
    if isinstance(given, np.floating):
        budget = float(given)
    if isinstance(budget, str):
        size = _read(budget, whole)
        if 0 < size < 1:
            meant = f"less than a byte; {size:.0%} is a share"
            raise ValueError(f"{_EXPECTED}; got {budget!r}, {meant}")
    elif isinstance(budget, float):
        if budget > 1:
            raise ValueError(
                f"{_EXPECTED}; got the float {budget!r}. For bytes pass int({budget!r})"
            )
        size = budget * whole
    else:
        try:
            size = operator.index(budget)
        except TypeError:
            raise TypeError(f"{_EXPECTED}; got {type(budget).__name__}") from None
    positive = budget > 0 if isinstance(budget, float) else size > 0
    if not positive or not math.isfinite(size):
        raise ValueError(f"{_EXPECTED}; got {budget!r}, which is not above zero")
    return int(size)


def _read(text: str, whole: int) -> float:
    match = re.fullmatch(r"\s*([+-]?[\d_]*\.?\d+(?:e[+-]?\d+)?)\s*(%|[a-z]*)\s*", text.lower())
    if match is None or (match[2] != "%" and match[2] not in _UNITS):
        raise ValueError(f"{_EXPECTED}; cannot read {text!r}")
    number = float(match[1])
    if match[2] == "%":
        if number > 100:
            raise ValueError(f"{_EXPECTED}; got {text!r}, more than there is")
        return max(number / 100 * whole, 1.0 if number > 0 else 0.0)
    return number * float(_UNITS[match[2]])
