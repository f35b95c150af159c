"""Collects the statistics that a measuring pass computes, now or after a compiled program."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad.insight.explaining.observed import Key
from tracegrad.insight.explaining.statistics import edge, exact, of_parts
from tracegrad.ir import Occurrence

_STACKED = 1 << 23  # bytes; arrays with larger stacks are measured in their loop
_OF_STACKS = (exact, edge)  # the measures of stacks


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
        self._steps: tuple[int, ...] | None = None
        self.is_muted = False

    @property
    def keys(self) -> list[Key]:
        return list(self._numbers)

    @contextmanager
    def collecting(self, steps: tuple[int, ...] | None = None) -> Iterator[dict[int, Any]]:
        """Yields a dict that gets the statistics measured inside the block, by the number of their
        key. With `steps` it gets `Deferred`, so that a compiled program returns only the arrays;
        `steps` are the lengths of the scans around the block, which stack these arrays."""
        outer, self._found = self._found, {}
        before, self._steps = self._steps, steps
        try:
            yield self._found
        finally:
            self._found, self._steps = outer, before

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
            is_later = self._steps is not None
            if self._steps:  # in scans
                size = sum(array.nbytes for array in jax.tree.leaves(args))
                is_later = measure in _OF_STACKS and math.prod(self._steps) * size <= _STACKED
            self._found[number] = Deferred(measure, args) if is_later else measure(*args)

    def scan(self, step: Any, init: Any, scanned: Any, length: int, reverse: bool) -> Any:
        """Calls `jax.lax.scan`, and adds the statistics of all steps."""
        expand: Callable[[Sequence[Any]], Any]

        def measured(state: Any, item: Any) -> Any:
            nonlocal expand
            with self.collecting(None if self._steps is None else (*self._steps, length)) as found:
                state, results = step(state, item)
            arrays, expand = distinct((results, _joined(found)))
            return state, arrays

        state, stacks = jax.lax.scan(measured, init, scanned, length=length, reverse=reverse)
        results, found = expand(stacks)
        self.add(found)
        return state, results

    def add(self, found: dict[int, Any]) -> None:
        """Adds statistics that an inner `collecting` got."""
        self._found.update(found)


def distinct(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the leaves of a tree, each once, and the function that makes the tree of them."""
    leaves, form = jax.tree.flatten(tree)
    once = {id(leaf): leaf for leaf in leaves}
    places = {name: k for k, name in enumerate(once)}
    which = [places[id(leaf)] for leaf in leaves]
    return list(once.values()), lambda arrays: jax.tree.unflatten(form, [arrays[k] for k in which])


def _joined(found: Mapping[int, Any]) -> dict[int, Any]:
    """Joins the arrays that are measured later to one vector for each dtype: each array that a loop
    returns costs XLA a kernel."""
    is_later = {n: getattr(s, "measure", None) in _OF_STACKS for n, s in found.items()}
    later = {n: jax.tree.flatten(s.args) for n, s in found.items() if is_later[n]}
    parts: dict[Any, list[Any]] = defaultdict(list)
    starts: dict[int, int] = {}
    for array in {id(x): x for leaves, _ in later.values() for x in leaves}.values():
        starts[id(array)] = sum(part.size for part in parts[array.dtype])
        parts[array.dtype].append(array)
    barrier: Callable[[Any], Any] = jax.lax.optimization_barrier  # else XLA computes parts twice
    joined = {t: jnp.concatenate([jnp.ravel(x) for x in barrier(parts[t])]) for t in parts}

    def deferred(measure: Any, leaves: Sequence[Any], form: Any) -> Deferred:
        places = tuple((starts[id(x)], x.shape) for x in leaves)
        stacks = tuple(joined[x.dtype] for x in leaves)
        return Deferred(functools.partial(of_parts, measure, form, places), stacks)

    return {**found, **{n: deferred(found[n].measure, *each) for n, each in later.items()}}
