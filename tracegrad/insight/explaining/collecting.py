"""Collects the statistics that a measuring pass computes, now or after a compiled program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from tracegrad.insight.explaining.observed import Key
from tracegrad.ir import Occurrence


@functools.partial(jax.tree_util.register_dataclass, data_fields=["args"], meta_fields=["measure"])
@dataclass(frozen=True)
class Deferred:
    """A statistic to be computed later, from the arrays `args`."""

    measure: Callable[..., Any]
    args: Any


class Collector:
    """The statistics of a pass: `keys` lists their keys, in the order of measuring."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._found: dict[int, Any] = {}
        self._is_deferring = False
        self.is_muted = False

    @property
    def keys(self) -> list[Key]:
        return list(self._numbers)

    @contextmanager
    def collecting(self, *, defer: bool = False) -> Iterator[dict[int, Any]]:
        """Yields a dict that gets the statistics measured inside the block, by the number of their
        key. With `defer` it gets `Deferred`, so that a compiled program returns only the arrays."""
        outer, self._found = self._found, {}
        before, self._is_deferring = self._is_deferring, defer
        try:
            yield self._found
        finally:
            self._found, self._is_deferring = outer, before

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Notes nothing inside the block: for values that the reverse pass recomputes."""
        before, self.is_muted = self.is_muted, True
        try:
            yield
        finally:
            self.is_muted = before

    def note(
        self, kind: str, of: Occurrence | None, k: int, measure: Callable[..., Any], *args: Any
    ) -> None:
        """Measures arrays and keeps the statistic under the key ``(kind, of, k)``."""
        if not self.is_muted:
            number = self._numbers.setdefault((kind, of, k), len(self._numbers))
            is_later = self._is_deferring
            self._found[number] = Deferred(measure, args) if is_later else measure(*args)

    def add(self, found: dict[int, Any]) -> None:
        """Adds statistics that an inner `collecting` got."""
        self._found.update(found)
