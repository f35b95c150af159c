"""Sums the sizes of live ranges at each moment."""

from __future__ import annotations

import itertools
from collections.abc import Iterable


def alive(spans: Iterable[tuple[int, int, int]], moments: int) -> list[int]:
    """A span is its first moment, its last moment, and its bytes."""
    changes = [0] * (moments + 1)
    for first, last, size in spans:
        changes[first] += size
        changes[min(last + 1, moments)] -= size
    return list(itertools.accumulate(changes[:moments]))
