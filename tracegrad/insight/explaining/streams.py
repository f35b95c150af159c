"""The operations through which most of a gradient comes to a value, and how each changes the norm.

Such a sequence of operations is a *stream*. If a value has several uses, its stream follows the use
that gives the value the largest cotangent (at a residual connection, not the branch that adds
little). So the changes along a stream add up to the change from end to end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracegrad.insight.explaining.detail import Detail
from tracegrad.insight.explaining.observed import Observed, Place
from tracegrad.insight.explaining.statistics import EDGE_NORM, NORM
from tracegrad.insight.explaining.visits import is_called, is_entered
from tracegrad.ir import Occurrence, Origin, Value
from tracegrad.ir.inlined import inside, onward
from tracegrad.ir.occurrence import Path


@dataclass(frozen=True)
class Link:
    """An operation on a stream: the norm of the cotangent of its result (`before`), and the norm of
    the cotangent of the operand to which the stream leads (`after`)."""

    occurrence: Occurrence
    origin: Origin | None
    before: float
    after: float

    @property
    def change(self) -> float:
        """The logarithm of the factor by which the norm changes."""
        if not (0 < self.before < math.inf and 0 < self.after < math.inf):
            return 0.0
        return math.log(self.after) - math.log(self.before)


@dataclass
class Streams:
    """The streams in a measured graph.

    With `Detail.ALL`, a use counts by the cotangent that it gives to the value; else by the
    cotangent that arrives at the use.
    """

    observed: Observed
    _known: dict[tuple[Path, Value], tuple[Occurrence, int, float] | None] = field(
        default_factory=dict
    )

    def to(self, value: Value, norm: float, path: Path = ()) -> list[Link]:
        """Returns the stream to a value of a region, from the value to the stream's start; `norm`:
        the norm of the value's cotangent."""
        found = []
        while (strongest := self._strongest(path, value)) is not None:
            here, k, before = strongest
            found.append(Link(here, here.origin, before, norm))
            path, value, norm = here.path, here.node.outputs[k], before
        return found

    def _strongest(self, path: Path, value: Value) -> tuple[Occurrence, int, float] | None:
        """Returns the operation that gives a value the largest cotangent, the number of its result
        with the largest cotangent, and that norm; None if no operation gives one."""
        if (path, value) not in self._known:
            _, here = max(self.uses(path, value), key=lambda use: use[0], default=(0.0, None))
            self._known[path, value] = None
            if here is not None:
                norms = [self._norm("ct", here, k) or 0.0 for k in range(len(here.node.outputs))]
                k = int(np.argmax(norms))
                self._known[path, value] = here, k, norms[k]
        return self._known[path, value]

    def uses(self, path: Path, value: Value) -> Iterator[tuple[float, Occurrence]]:
        """Returns the operations that use a value (also in called regions), each with the norm of
        the cotangent that it gives to the value."""
        region = self.observed.region(path)
        for node in region.users.get(value, ()):
            here = Occurrence(path, node)
            if is_called(node) and is_entered(node):
                for each in inside(here, value):
                    yield from self.uses(*each)
                continue
            given = [self._norm("edge", here, i) for i, v in enumerate(node.inputs) if v is value]
            if self.observed.detail is not Detail.ALL:
                given = [self._norm("ct", here, k) for k in range(len(node.outputs))]
            if any(norm is not None for norm in given):
                yield max(filter(None, given), default=0.0), here
        if path and is_called(path[-1][0]):
            for each in onward(path, value):
                yield from self.uses(*each)

    def _norm(self, kind: str, here: Occurrence, k: int) -> float | None:
        """Returns a norm over all runs of an operation; Inf if it is not finite."""
        stat = self.observed.get(kind, Place(here), k)
        if stat is None:
            return None
        return total(stat[..., EDGE_NORM if kind == "edge" else NORM])


def total(norms: np.ndarray[Any, Any]) -> float:
    """Returns a norm over all runs. A run that did not happen has the norm NaN, and is left out."""
    found = np.asarray(norms, np.float64)
    found = found[~np.isnan(found)]
    largest = np.max(found, initial=0.0)
    if not 0 < largest < math.inf:
        return float(largest)
    return float(largest * np.sqrt(np.sum(np.square(found / largest))))
