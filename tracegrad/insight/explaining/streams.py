"""By which operations most of a gradient comes to a value, and what each does to its norm.

Where a value is used twice, the stream goes by the use that gives it more: past a branch that adds
little to a residual connection. So changes along a stream add up to the change from end to end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tracegrad import _jax
from tracegrad.insight.explaining.observed import Observed, Place
from tracegrad.insight.explaining.statistics import EDGE_NORM, NORM
from tracegrad.insight.explaining.visits import is_called, is_entered
from tracegrad.ir import Node, Occurrence, Origin, Value
from tracegrad.ir.inlined import inside, onward, outside
from tracegrad.ir.occurrence import Path


@dataclass(frozen=True)
class Link:
    """An operation on a stream: the norm of the cotangent of its result, and the norm of the
    cotangent of the operand that the stream goes on to."""

    occurrence: Occurrence
    result: Value
    origin: Origin | None
    before: float
    after: float

    @property
    def change(self) -> float:
        """The logarithm of how the norm changes."""
        if not (0 < self.before < math.inf and 0 < self.after < math.inf):
            return 0.0
        return math.log(self.after) - math.log(self.before)


@dataclass
class Streams:
    """The streams in what a pass has observed.

    The close form of the pass tells what each use gives to a value. Without it a use counts by the
    cotangent that arrives at the use.
    """

    observed: Observed
    _known: dict[tuple[Path, Value], Link | None] = field(default_factory=dict)

    @cached_property
    def _has_edges(self) -> bool:
        return any(kind == "edge" for kind, *_ in self.observed.stats)

    def to(self, value: Value, path: Path = ()) -> list[Link]:
        """The stream to a value of a region, from the value on to where the gradient begins."""
        found = []
        while (link := self.next(path, value)) is not None:
            found.append(link)
            path, value = link.occurrence.path, link.result
        return found

    def next(self, path: Path, value: Value) -> Link | None:
        """The operation from which most of the gradient of a value comes."""
        if (path, value) not in self._known:
            self._known[path, value] = self._strongest(path, value)
        return self._known[path, value]

    def _strongest(self, path: Path, value: Value) -> Link | None:
        most, here = max(self._uses(path, value), key=lambda use: use[0], default=(0.0, None))
        if here is None:
            return None
        norms = [self._norm("ct", here, k) or 0.0 for k in range(len(here.node.outputs))]
        k = int(np.argmax(norms))
        after = self._of_value(path, value) or most
        return Link(here, here.node.outputs[k], here.origin, norms[k], after)

    def _uses(self, path: Path, value: Value) -> Iterator[tuple[float, Occurrence]]:
        """The operations that use a value, in called regions too, and what each gives to it."""
        region = self.observed.region(path)
        for node in region.users.get(value, ()):
            here = Occurrence(path, node)
            if _is_looked_into(node):
                for each in inside(here, value):
                    yield from self._uses(*each)
                continue
            given = [self._norm("edge", here, i) for i, v in enumerate(node.inputs) if v is value]
            if not self._has_edges:
                given = [self._norm("ct", here, k) for k in range(len(node.outputs))]
            if any(norm is not None for norm in given):
                yield max(filter(None, given), default=0.0), here
        if path and is_called(path[-1][0]):
            for each in onward(path, value):
                yield from self._uses(*each)

    def _of_value(self, path: Path, value: Value) -> float | None:
        """The norm of the cotangent of a value; None where that is not known."""
        region = self.observed.region(path)
        node = region.producers.get(value)
        if node is not None:
            return self._norm("ct", Occurrence(path, node), node.outputs.index(value))
        if path and path[-1][0].primitive is _jax.SCAN:
            return self._of_carry(path, region.inputs.index(value))
        if not path or not is_called(path[-1][0]):
            return None
        around, outer = outside(path, value)[0]
        return self._of_value(around, outer) if isinstance(outer, Value) else None

    def _of_carry(self, path: Path, index: int) -> float | None:
        """The same of a carry: of what the step before gave on."""
        call = Place(Occurrence(path[:-1], path[-1][0]))
        first, _ = _jax.scan_split(call.node.params)
        stat = self.observed.get("carry", call, index - first)
        if stat is None:
            return None
        others = slice(1, None) if call.node.params["reverse"] else slice(None, -1)
        return total(stat[..., others, NORM])

    def _norm(self, kind: str, here: Occurrence, k: int) -> float | None:
        """A norm over all runs of an operation; Inf where it is not finite."""
        stat = self.observed.get(kind, Place(here), k)
        if stat is None:
            return None
        return total(stat[..., EDGE_NORM if kind == "edge" else NORM])


def total(norms: np.ndarray[Any, Any]) -> float:
    """A norm over all runs, without those that did not happen."""
    found = np.asarray(norms, np.float64)
    found = found[~np.isnan(found)]
    largest = np.max(found, initial=0.0)
    if not 0 < largest < math.inf:
        return float(largest)
    return float(largest * np.sqrt(np.sum(np.square(found / largest))))


def _is_looked_into(node: Node) -> bool:
    return is_called(node) and is_entered(node)
