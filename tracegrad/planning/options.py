"""What users write → numbers: a memory budget, how many plans to compile, what offloading costs."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad.planning.tuning import TUNING

MemoryBudget = int | float | str
Measure = bool | int
Offload = bool | float

_UNITS = {"": 1, "b": 1, "%": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_EXPECTED = (
    'a memory budget is bytes (an int, or a string like "2GiB", "800 MB"), or a share of the peak '
    'without recompute (a float above 0 and up to 1, or a string like "40%")'
)


def budget_bytes(budget: MemoryBudget, whole: int) -> int:
    """The bytes that a budget stands for; `whole`: what a share is a share of.

    Raises TypeError for one of another type, ValueError for one that is not above 0, or cannot be
    read.

    >>> budget_bytes("2GiB", 0), budget_bytes("1.5 MB", 0), budget_bytes("40%", 1000)
    (2147483648, 1500000, 400)
    >>> budget_bytes(0.25, 1000), budget_bytes(4096, 0)
    (250, 4096)
    """
    if isinstance(budget, str):
        read = re.fullmatch(r"\s*([+-]?[\d_]*\.?\d+(?:e[+-]?\d+)?)\s*(%|[a-z]*)\s*", budget.lower())
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
        wrong = "more than there is"
        wrong += f". For bytes pass int({budget!r})" if not isinstance(budget, str) else ""
    elif unit != "%" and size < 1:
        wrong = f"less than a byte; {size:.0%} is a share"
    if wrong:
        raise ValueError(f"{_EXPECTED}; got {budget!r}, {wrong}")
    return max(1, int(size))


def plans_to_compile(measure: Measure) -> int:
    """How many plans may be compiled: as many as `measure` says, two for True, none for False.

    Raises TypeError, ValueError for what is no number of plans.
    """
    if isinstance(measure, bool):
        return TUNING.plans if measure else 0
    expected = "measure= is True, False or how many plans to compile at most"
    if not hasattr(measure, "__index__"):
        raise TypeError(f"{expected}, not {measure!r}")
    if measure < 1:
        raise ValueError(f"{expected}, at least 1, not {measure!r}; False compiles nothing")
    return operator.index(measure)


def transfer_flops(offload: Offload, measure: bool) -> float:
    """FLOPs for which there is time while a byte goes to the host's memory and back: measured, once
    for a device, for True; infinitely many for False, as nothing goes there.

    `measure`: whether plans are for the devices that are here. Raises TypeError, ValueError for a
    number that is none, and where the devices have no memory but the host's.
    """
    if offload is False:
        return math.inf
    if not isinstance(offload, bool | int | float):
        raise TypeError(f"offload= is True, False or FLOPs for a byte, not {offload!r}")
    if not 0 < offload < math.inf:
        raise ValueError(f"offload= wants FLOPs for a byte above zero, not {offload!r}")
    device = jax.local_devices()[0]
    if (measure or offload is True) and not _jax.has_host_memory(device):
        raise ValueError(
            f"offload= keeps values in the host's memory, but {device.device_kind!r} has no other: "
            "nothing would be saved. To plan for another device, pass measure=False and how many "
            "FLOPs that does while a byte goes to the host and back"
        )
    return _jax.transfer_flops(device) if offload is True else float(offload)
