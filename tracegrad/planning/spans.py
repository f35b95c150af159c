"""Sums over time of what has a beginning and an end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable


def alive(spans: Iterable[tuple[int, int, int]], moments: int) -> list[int]:
    """Bytes alive at each of so many moments, of what has a first one, a last one and a size."""
    changes = [0] * (moments + 1)
    for first, last, size in spans:
        changes[first] += size
        changes[min(last + 1, moments)] -= size
    return list(itertools.accumulate(changes[:moments]))
