"""Minimum cuts: which values to save so that the rest is recomputed at the least price.

Every value that the backward pass reads must be saved, at a price for each byte, or run again, for
its FLOPs, and then what it is computed from must be there in its turn. A value that is there but
not run pays for its bytes, one that is run pays for its FLOPs: both are arcs of a network, and the
cheapest choice is its minimum cut (the project selection problem; for tensors, as in PyTorch's
min-cut partitioner of functorch). The save sets of all prices are the lower convex hull of (bytes,
FLOPs) over all save sets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import (  # type: ignore[import-untyped]
    breadth_first_order,
    maximum_flow,
)

# Capacities are whole numbers: fractions of this. Sums of 2 ** 17 of them fit 64 bits.
_BITS = 44
_SCALE = 1 << _BITS
_INFINITE = 2 * _SCALE


@dataclass(frozen=True)
class Cut:
    """The cheapest choice for a price: `saved`, its bytes that cost something, the FLOPs of what is
    run again."""

    saved: frozenset[int]
    bytes: int
    flops: int


class Network:
    """The choice for a program, or a piece of it.

    Args:
      sizes, flops, args: of each operation the bytes, the FLOPs (infinite for what cannot be run
        again) and the operations that it reads.
      needed: what the backward pass reads.
      must_run: what is run again in any case.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        flops: Sequence[float],
        args: Sequence[Sequence[int]],
        needed: Iterable[int],
        must_run: Iterable[int] = (),
    ):
        needed, must_run = sorted(set(needed)), sorted(set(must_run))
        number: dict[int, int] = {}
        pending = [*needed, *must_run]
        inner_arcs = []
        while pending:
            v = pending.pop()
            if v in number:
                continue
            number[v] = len(number)
            for u in args[v]:
                inner_arcs.append((v, u))
                pending.append(u)
        self.values = list(number)
        there = {v: 2 + 2 * k for v, k in number.items()}
        run = {v: 3 + 2 * k for v, k in number.items()}
        source, sink = 0, 1
        arcs = [(there[v], run[v]) for v in self.values]
        arcs += [(run[v], sink) for v in self.values]
        arcs += [(run[v], there[u]) for v, u in inner_arcs]
        arcs += [(source, there[v]) for v in needed] + [(source, run[v]) for v in must_run]
        self._arcs = _Arcs(2 + 2 * len(number), np.array(arcs, np.int32).reshape(-1, 2))
        self._sizes = np.array([sizes[v] for v in self.values], float)
        self._flops = np.array([flops[v] for v in self.values], float)
        self._endless = np.full(len(arcs) - 2 * len(self.values), _INFINITE, np.int64)

    def cut(self, price: float) -> Cut:
        """The cheapest choice; `price`: FLOPs for a byte, infinite to save only what must be."""
        if not self.values:
            return Cut(frozenset(), 0, 0)
        # Saving a value never pays if it costs more than running everything.
        can_run = self._flops < math.inf
        scale = _SCALE / max(1.0, 2.0 * self._flops[can_run].sum())
        if math.isinf(price):
            saving = np.where((self._sizes > 0) & can_run, _SCALE, 0)
        else:
            saving = np.minimum(np.floor(self._sizes * price * scale), _SCALE)
        running = np.minimum(np.floor(self._flops * scale), _INFINITE)
        beyond = self._arcs.beyond(np.concatenate([saving, running, self._endless]))
        is_run = ~beyond[3::2]
        is_saved = beyond[3::2] & ~beyond[2::2]
        saved = frozenset(itertools.compress(self.values, is_saved))
        size, flops = int(self._sizes[is_saved].sum()), int(self._flops[is_run].sum())
        return Cut(saved, size, flops)

    def hull(self, most: int) -> list[Cut]:
        """Save sets from the cheapest to compute to the smallest, on the convex hull of both.

        At most `most` of them: the widest gaps are looked into first.
        """
        first, last = self.cut(0.0), self.cut(math.inf)
        cuts, gaps = [first], [(first, last)]
        if last.bytes < first.bytes:
            cuts.append(last)
        while gaps and len(cuts) < most:
            a, b = gap = max(gaps, key=lambda gap: _area(*gap))
            gaps.remove(gap)
            if _area(a, b) > 0:
                price = (b.flops - a.flops) / (a.bytes - b.bytes)
                found = self.cut(price)
                least = (1 - 1e-9) * (a.flops + price * a.bytes)
                if found.flops + price * found.bytes < least and b.bytes < found.bytes < a.bytes:
                    cuts.append(found)
                    gaps += [(a, found), (found, b)]
        return sorted(cuts, key=lambda cut: -cut.bytes)


class _Arcs:
    """The arcs of a network from its node 0 to its node 1, with one back for each: rows of SciPy's
    compressed form, which stay while capacities change."""

    def __init__(self, count: int, arcs: np.ndarray):
        self._count = count
        both = np.concatenate([arcs, arcs[:, ::-1]]).astype(np.int64)
        keys, places = np.unique(both[:, 0] * count + both[:, 1], return_inverse=True)
        self._there, back = places[: len(arcs)], places[len(arcs) :]
        self._tails, self._heads = (keys // count).astype(np.int32), (keys % count).astype(np.int32)
        self._starts = np.searchsorted(self._tails, np.arange(count + 1)).astype(np.int32)
        self._opposite = np.empty(len(keys), np.int64)
        self._opposite[self._there], self._opposite[back] = back, self._there

    def beyond(self, capacities: np.ndarray) -> np.ndarray:
        """The sink's side of the minimum cut: of several, that with the fewest nodes, from which
        more could flow to the sink."""
        is_open = self._left(capacities)[self._opposite] > 0
        starts = np.concatenate([[0], np.cumsum(is_open)])[self._starts].astype(np.int32)
        heads = self._heads[is_open]
        back = csr_array((np.ones(len(heads), np.int8), heads, starts), (self._count,) * 2)
        found = np.zeros(self._count, bool)
        found[breadth_first_order(back, 1, return_predecessors=False)] = True
        return found

    def _left(self, capacities: np.ndarray) -> np.ndarray:
        """What a maximum flow leaves of capacities of 64 bits.

        SciPy has 32 bits, and drops the others in silence. So the flow is made in rounds, of the
        high bits first (capacity scaling), and is exact. After a round less than a unit of it fits
        through each arc of some cut, so that the flow of the next round is below `most`, and larger
        capacities are as good as that.
        """
        most = 1 << 30
        bits = 29 - len(self._heads).bit_length()
        assert bits > 0, "half a billion arcs"
        left = np.zeros(len(self._heads), np.int64)
        np.add.at(left, self._there, capacities.astype(np.int64))
        for shift in reversed(range(0, _BITS, bits)):
            room = np.minimum(left >> shift, most).astype(np.int32)
            network = csr_array((room, self._heads, self._starts), (self._count,) * 2)
            left -= maximum_flow(network, 0, 1).flow.data.astype(np.int64) << shift
        return left


def _area(a: Cut, b: Cut) -> float:
    return float(a.bytes - b.bytes) * float(b.flops - a.flops)
