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
from collections.abc import Generator, Iterable, Sequence
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
_ARCS = 8_000  # of networks that are solved at once, which spares most of what SciPy does around


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
        while pending:
            v = pending.pop()
            if v not in number:
                number[v] = len(number)
                pending += args[v]
        self.values = list(number)
        # A value has two nodes behind the source, 0, and the sink, 1: it is there, and it is run.
        there = {v: 2 + 2 * k for v, k in number.items()}
        arcs = [(there[v], there[v] + 1) for v in self.values]
        arcs += [(there[v] + 1, 1) for v in self.values]
        arcs += [(there[v] + 1, there[u]) for v in self.values for u in set(args[v])]
        arcs += [(0, there[v]) for v in needed] + [(0, there[v] + 1) for v in must_run]
        self.arcs = np.array(arcs, np.int32).reshape(-1, 2)
        self.nodes = 2 + 2 * len(number)
        self._sizes = np.array([sizes[v] for v in self.values], float)
        self._flops = np.array([flops[v] for v in self.values], float)

    def capacities(self, price: float) -> np.ndarray:
        """Those of the arcs; `price`: FLOPs for a byte, infinite to save only what must be."""
        found = np.full(len(self.arcs), _INFINITE, np.int64)
        # Saving a value never pays if it costs more than running everything.
        can_run = self._flops < math.inf
        scale = _SCALE / max(1.0, 2.0 * self._flops[can_run].sum())
        count = len(self.values)
        if math.isinf(price):
            found[:count] = np.where((self._sizes > 0) & can_run, _SCALE, 0)
        else:
            found[:count] = np.minimum(np.floor(self._sizes * price * scale), _SCALE)
        found[count : 2 * count] = np.minimum(np.floor(self._flops * scale), _INFINITE)
        return found

    def cut(self, is_beyond: np.ndarray) -> Cut:
        """The choice of a minimum cut; `is_beyond`: which nodes are on the sink's side."""
        is_run = ~is_beyond[3::2]
        is_saved = is_beyond[3::2] & ~is_beyond[2::2]
        saved = frozenset(itertools.compress(self.values, is_saved))
        return Cut(saved, int(self._sizes[is_saved].sum()), int(self._flops[is_run].sum()))


def hulls(networks: Sequence[Network], most: int) -> list[list[Cut]]:
    """For each network save sets from the cheapest to compute to the smallest, on the convex hull
    of both. At most `most` of them: the widest gaps are looked into first."""
    found: dict[int, list[Cut]] = {}
    searches = {k: _hull(most) for k in range(len(networks))}
    prices = {k: next(search) for k, search in searches.items()}
    while prices:
        cuts = minimum_cuts([(networks[k], price) for k, price in prices.items()])
        for k, cut in zip(list(prices), cuts, strict=True):
            try:
                prices[k] = searches[k].send(cut)
            except StopIteration as end:
                found[k] = end.value
                del prices[k]
    return [found[k] for k in searches]


def _hull(most: int) -> Generator[float, Cut, list[Cut]]:
    """Yields prices, takes the cheapest choice for each."""
    first = yield 0.0
    last = yield math.inf
    cuts, gaps = [first], [(first, last)]
    if last.bytes < first.bytes:
        cuts.append(last)
    while gaps and len(cuts) < most:
        a, b = gap = max(gaps, key=lambda gap: _area(*gap))
        gaps.remove(gap)
        if _area(a, b) > 0:
            price = (b.flops - a.flops) / (a.bytes - b.bytes)
            found = yield price
            least = (1 - 1e-9) * (a.flops + price * a.bytes)
            if found.flops + price * found.bytes < least and b.bytes < found.bytes < a.bytes:
                cuts.append(found)
                gaps += [(a, found), (found, b)]
    return sorted(cuts, key=lambda cut: -cut.bytes)


def _area(a: Cut, b: Cut) -> float:
    return float(a.bytes - b.bytes) * float(b.flops - a.flops)


def minimum_cuts(asked: Sequence[tuple[Network, float]]) -> list[Cut]:
    """The cheapest choice of each network for its price. Several are one network with the same
    source and sink."""
    cuts, begin = list[Cut](), 0
    while begin < len(asked):
        end, arcs = begin, 0
        while end < len(asked) and (end == begin or arcs + len(asked[end][0].arcs) <= _ARCS):
            arcs += len(asked[end][0].arcs)
            end += 1
        part, begin = asked[begin:end], end
        before = [0, *itertools.accumulate(network.nodes - 2 for network, _ in part)]
        pairs = zip(part, before, strict=False)
        ends = [np.where(n.arcs > 1, n.arcs + offset, n.arcs) for (n, _), offset in pairs]
        is_beyond = _beyond(
            np.concatenate(ends),
            np.concatenate([network.capacities(price) for network, price in part]),
            2 + before[-1],
        )
        for (network, _), offset in zip(part, before, strict=False):
            own = is_beyond[2 + offset : network.nodes + offset]
            cuts.append(network.cut(np.concatenate([is_beyond[:2], own])))
    return cuts


def _beyond(arcs: np.ndarray, capacities: np.ndarray, nodes: int) -> np.ndarray:
    """The sink's side of the minimum cut: of several, that with the fewest nodes, from which more
    could flow to the sink.

    SciPy has 32 bits, and drops the others in silence. So the flow is made in rounds, of the high
    bits first (capacity scaling), and is exact. After a round less than a unit of it fits through
    each arc of some cut, so that the flow of the next round is below `most`, and larger capacities
    are as good as that.
    """
    most = 1 << 30
    bits = 29 - len(arcs).bit_length()
    assert bits > 0, "half a billion arcs"
    left = csr_array((capacities, (arcs[:, 0], arcs[:, 1])), (nodes, nodes))
    for shift in reversed(range(0, _BITS, bits)):
        room = np.minimum(left.data >> shift, most).astype(np.int32)
        network = csr_array((room, left.indices, left.indptr), left.shape)
        flow = maximum_flow(network, 0, 1).flow.astype(np.int64)
        flow.data <<= shift
        left = left - flow
    found = np.zeros(nodes, bool)
    found[breadth_first_order(left.T.tocsr(), 1, return_predecessors=False)] = True
    return found
