"""Finds by minimum cuts the values to save, so that saving and recomputing cost the least.

Every value that the backward pass reads must be available. A value is either saved, at a price for
each byte, or recomputed, at the cost of its FLOPs; then its operands must be available as well.
Both costs are arcs of a network, and the cheapest choice is the minimum cut of the network (the
project selection problem; PyTorch's min-cut partitioner of functorch solves it for tensors). The
save sets for all prices are the lower convex hull of (bytes, FLOPs) over all save sets.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Capacities are integers, in units of 1 / _SCALE. Sums of 2 ** 17 of them fit 64 bits.
_BITS = 44
_SCALE = 1 << _BITS
_INFINITE = 2 * _SCALE
_ARCS = 8_000  # of networks that are solved together, to call SciPy less often


@dataclass(frozen=True)
class SaveSet:
    """The cheapest choice for a price: the `saved` operations, their bytes, and the FLOPs of the
    recomputed operations."""

    saved: frozenset[int]
    bytes: int
    flops: int


class Network:
    """The network for the choice in a program, or in a piece of a program.

    Args:
      sizes, flops, args: the bytes, the FLOPs (infinite for an operation that cannot be recomputed)
        and the operands of each operation.
      needed: the operations whose results the backward pass reads.
      must_run: the operations that every choice recomputes.
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
        # Node 0 is the source, node 1 the sink. Each value has two nodes: "available" and
        # "recomputed".
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
        """`price` is in FLOPs per byte; an infinite price saves as few bytes as possible."""
        found = np.full(len(self.arcs), _INFINITE, np.int64)
        can_run = self._flops < math.inf
        everything = max(1.0, self._flops[can_run].sum())
        price = min(price, 2 * everything)  # one byte costs more than to recompute everything
        # Saving a value never pays if it costs more than to recompute all operations that can be
        # recomputed, and to save the other values.
        scale = _SCALE / (2 * (everything + price * self._sizes[~can_run].sum()))
        count = len(self.values)
        found[:count] = np.minimum(np.floor(self._sizes * price * scale), _SCALE)
        found[count : 2 * count] = np.minimum(np.floor(self._flops * scale), _INFINITE)
        return found

    def cut(self, is_beyond: np.ndarray) -> SaveSet:
        """`is_beyond` says of each node whether it is on the sink's side."""
        is_run = ~is_beyond[3::2]
        is_saved = is_beyond[3::2] & ~is_beyond[2::2]
        saved = frozenset(itertools.compress(self.values, is_saved))
        return SaveSet(saved, int(self._sizes[is_saved].sum()), int(self._flops[is_run].sum()))


def hulls(networks: Sequence[Network], most: int) -> list[list[SaveSet]]:
    """Returns save sets of each network on the convex hull of bytes and FLOPs.

    The save sets go from the fewest FLOPs to the fewest bytes; there are at most `most` per
    network. The gaps of the largest area (bytes times FLOPs) are searched first.
    """
    found: dict[int, list[SaveSet]] = {}
    searches = {k: _search_hull(most) for k in range(len(networks))}
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


def _search_hull(most: int) -> Generator[float, SaveSet, list[SaveSet]]:
    """Yields prices, is sent the cheapest choice for each price, and returns the hull."""
    first = yield 0.0
    last = yield math.inf
    cuts, gaps = [first], [(first, last)]
    if last.bytes < first.bytes:
        cuts.append(last)
    while gaps and len(cuts) < most:
        a, b = gap = max(gaps, key=lambda gap: _rectangle_area(*gap))
        gaps.remove(gap)
        if _rectangle_area(a, b) > 0:
            price = (b.flops - a.flops) / (a.bytes - b.bytes)
            found = yield price
            least = (1 - 1e-9) * (a.flops + price * a.bytes)
            if found.flops + price * found.bytes < least and b.bytes < found.bytes < a.bytes:
                cuts.append(found)
                gaps += [(a, found), (found, b)]
    return sorted(cuts, key=lambda cut: -cut.bytes)


def _rectangle_area(a: SaveSet, b: SaveSet) -> float:
    return float(a.bytes - b.bytes) * float(b.flops - a.flops)


def minimum_cuts(asked: Sequence[tuple[Network, float]]) -> list[SaveSet]:
    """Returns the cheapest choice of each network for its price. Several networks are joined into
    one at their sources and sinks, and solved together."""
    cuts, begin = list[SaveSet](), 0
    while begin < len(asked):
        end, arcs = begin, 0
        while end < len(asked) and (end == begin or arcs + len(asked[end][0].arcs) <= _ARCS):
            arcs += len(asked[end][0].arcs)
            end += 1
        part, begin = asked[begin:end], end
        before = [0, *itertools.accumulate(network.nodes - 2 for network, _ in part)]
        pairs = zip(part, before, strict=False)
        ends = [np.where(n.arcs > 1, n.arcs + offset, n.arcs) for (n, _), offset in pairs]
        is_beyond = _find_sink_side(
            np.concatenate(ends),
            np.concatenate([network.capacities(price) for network, price in part]),
            2 + before[-1],
        )
        for (network, _), offset in zip(part, before, strict=False):
            own = is_beyond[2 + offset : network.nodes + offset]
            cuts.append(network.cut(np.concatenate([is_beyond[:2], own])))
    return cuts


def _find_sink_side(arcs: np.ndarray, capacities: np.ndarray, nodes: int) -> np.ndarray:
    """Returns for each node whether it is on the sink's side of the minimum cut.

    Of several minimum cuts, this is the cut with the fewest nodes on the sink's side: the nodes
    from which more could flow to the sink.

    SciPy uses 32-bit capacities, and silently drops the higher bits. So the flow is computed in
    rounds, the high bits of the capacities first (capacity scaling), and is exact. After a round,
    less than one unit of that round is left in each arc of some cut. So the next round adds a flow
    of at most ``len(arcs) << bits``, which is below `most`, and larger capacities can be limited to
    `most`.
    """
    most = 1 << 30
    bits = 29 - len(arcs).bit_length()
    assert bits > 0, "half a billion arcs"
    # Imported late: SciPy's graphs take 14 MiB, also in a process that plans nothing.
    csgraph = importlib.import_module("scipy.sparse.csgraph")
    csr_array = importlib.import_module("scipy.sparse").csr_array
    left = csr_array((capacities, (arcs[:, 0], arcs[:, 1])), (nodes, nodes))
    for shift in reversed(range(0, _BITS, bits)):
        room = np.minimum(left.data >> shift, most).astype(np.int32)
        network = csr_array((room, left.indices, left.indptr), left.shape)
        flow = csgraph.maximum_flow(network, 0, 1).flow.astype(np.int64)
        flow.data <<= shift
        left = left - flow
    found = np.zeros(nodes, bool)
    found[csgraph.breadth_first_order(left.T.tocsr(), 1, return_predecessors=False)] = True
    return found
