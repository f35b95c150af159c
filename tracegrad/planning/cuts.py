"""Finds the values to save, by minimum cuts, so that saving plus recomputing is the cheapest.

Every value that the backward pass reads must be available. Saving a value costs a price for each
byte. Recomputing a value costs its FLOPs, and needs its operands to be available as well. Both
costs are arcs of a network, and the cheapest choice is the minimum cut of the network (the project
selection problem; PyTorch's min-cut partitioner of functorch solves it for tensors). The cheapest
save sets for all prices lie on the lower convex hull of (bytes, FLOPs) over all save sets.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Capacities are integers, at most 2 * _SCALE: sums of 2 ** 17 capacities fit 64 bits.
_BITS = 44
_SCALE = 1 << _BITS
_INFINITE = 2 * _SCALE
_MOST_ARCS = 8_000  # in one call of SciPy, which solves several networks (a larger one is alone)


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
      sizes: the bytes of each operation's result.
      flops: the FLOPs of each operation; infinite if the operation cannot be recomputed.
      args: the operands of each operation.
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
        index: dict[int, int] = {}
        pending = [*needed, *must_run]
        while pending:
            v = pending.pop()
            if v not in index:
                index[v] = len(index)
                pending += args[v]
        self.values = list(index)
        # Node 0 is the source, node 1 the sink. Each value has two nodes: "available" (2, 4, ...)
        # and "recomputed" (3, 5, ...). A choice pays for the arcs from the source's side to the
        # sink's side: for an available value that is not recomputed its bytes; for a recomputed
        # value its FLOPs. An infinite arc leads to what must be available or recomputed as well.
        available = {v: 2 + 2 * k for v, k in index.items()}
        arcs = [(available[v], available[v] + 1) for v in self.values]
        arcs += [(available[v] + 1, 1) for v in self.values]
        arcs += [(available[v] + 1, available[u]) for v in self.values for u in set(args[v])]
        arcs += [(0, available[v]) for v in needed]
        arcs += [(0, available[v] + 1) for v in must_run]
        self.arcs = np.array(arcs, np.int32).reshape(-1, 2)
        self.nodes = 2 + 2 * len(index)
        self._sizes = np.array([sizes[v] for v in self.values], float)
        self._flops = np.array([flops[v] for v in self.values], float)

    def capacities(self, price: float) -> np.ndarray:
        """`price` is in FLOPs per byte; an infinite price saves as few bytes as possible."""
        capacities = np.full(len(self.arcs), _INFINITE, np.int64)
        can_recompute = self._flops < math.inf
        total_flops = max(1.0, self._flops[can_recompute].sum())
        price = min(price, 2 * total_flops)  # one byte already costs more than all FLOPs
        # One choice recomputes all values that can be recomputed, and saves the others. No cheapest
        # choice saves a value that costs more than this one: its capacity can be limited.
        scale = _SCALE / (2 * (total_flops + price * self._sizes[~can_recompute].sum()))
        count = len(self.values)
        capacities[:count] = np.minimum(np.floor(self._sizes * price * scale), _SCALE)
        capacities[count : 2 * count] = np.minimum(np.floor(self._flops * scale), _INFINITE)
        return capacities

    def save_set(self, is_on_sink_side: np.ndarray) -> SaveSet:
        """`is_on_sink_side` says of each node whether it is on the sink's side."""
        runs = ~is_on_sink_side[3::2]
        is_saved = is_on_sink_side[3::2] & ~is_on_sink_side[2::2]
        saved = frozenset(itertools.compress(self.values, is_saved))
        return SaveSet(saved, int(self._sizes[is_saved].sum()), int(self._flops[runs].sum()))


def find_hulls(networks: Sequence[Network], at_most: int) -> list[list[SaveSet]]:
    """Returns save sets of each network on the convex hull of bytes and FLOPs.

    The save sets go from the fewest FLOPs to the fewest bytes; there are at most `at_most` per
    network. The gaps of the largest area (bytes times FLOPs) are searched first.
    """
    hulls_by_network: dict[int, list[SaveSet]] = {}
    searches = {k: _search_hull(at_most) for k in range(len(networks))}
    prices = {k: next(search) for k, search in searches.items()}
    while prices:
        save_sets = cheapest_save_sets([(networks[k], price) for k, price in prices.items()])
        for k, save_set in zip(list(prices), save_sets, strict=True):
            try:
                prices[k] = searches[k].send(save_set)
            except StopIteration as end:
                hulls_by_network[k] = end.value
                del prices[k]
    return [hulls_by_network[k] for k in searches]


def _search_hull(at_most: int) -> Generator[float, SaveSet, list[SaveSet]]:
    """Yields prices, is sent the cheapest choice for each price, and returns the hull."""
    first = yield 0.0
    last = yield math.inf
    save_sets, gaps = [first], [(first, last)]
    if last.bytes < first.bytes:
        save_sets.append(last)
    while gaps and len(save_sets) < at_most:
        a, b = gap = max(gaps, key=lambda gap: _rectangle_area(*gap))
        gaps.remove(gap)
        if _rectangle_area(a, b) > 0:
            price = (b.flops - a.flops) / (a.bytes - b.bytes)
            between = yield price
            # A choice on the line from `a` to `b` is no gain; the factor allows for rounding.
            bound = (1 - 1e-9) * (a.flops + price * a.bytes)
            if between.flops + price * between.bytes < bound and b.bytes < between.bytes < a.bytes:
                save_sets.append(between)
                gaps += [(a, between), (between, b)]
    return sorted(save_sets, key=lambda save_set: -save_set.bytes)


def _rectangle_area(a: SaveSet, b: SaveSet) -> float:
    return float(a.bytes - b.bytes) * float(b.flops - a.flops)


def cheapest_save_sets(requests: Sequence[tuple[Network, float]]) -> list[SaveSet]:
    """Returns the cheapest choice of each network for its price. Several networks are joined into
    one at their sources and sinks, and solved together."""
    save_sets, begin = list[SaveSet](), 0
    while begin < len(requests):
        end, arcs = begin, 0
        while end < len(requests):
            arcs += len(requests[end][0].arcs)
            if end > begin and arcs > _MOST_ARCS:
                break
            end += 1
        batch, begin = requests[begin:end], end
        offsets = [0, *itertools.accumulate(network.nodes - 2 for network, _ in batch)]
        pairs = zip(batch, offsets, strict=False)
        arcs_of_batch = [np.where(n.arcs > 1, n.arcs + offset, n.arcs) for (n, _), offset in pairs]
        is_on_sink_side = _find_sink_side(
            np.concatenate(arcs_of_batch),
            np.concatenate([network.capacities(price) for network, price in batch]),
            2 + offsets[-1],
        )
        for (network, _), offset in zip(batch, offsets, strict=False):
            own_side = is_on_sink_side[2 + offset : network.nodes + offset]
            save_sets.append(network.save_set(np.concatenate([is_on_sink_side[:2], own_side])))
    return save_sets


def _find_sink_side(arcs: np.ndarray, capacities: np.ndarray, nodes: int) -> np.ndarray:
    """Returns for each node whether it is on the sink's side of the minimum cut.

    Of several minimum cuts, this is the cut with the fewest nodes on the sink's side: the nodes
    with a residual path to the sink.

    SciPy uses 32-bit capacities, and silently drops the higher bits. So the flow is computed in
    rounds, the high bits of the capacities first (capacity scaling), and is exact. After a round,
    the residual capacity of each arc of some cut is less than one unit of that round. So the next
    round adds a flow below ``len(arcs) << bits``, which is below `largest`: limiting a capacity to
    `largest` changes nothing.
    """
    largest = 1 << 30
    bits = 29 - len(arcs).bit_length()
    assert bits > 0, "too many arcs"
    # Imported late: `scipy.sparse.csgraph` takes 14 MiB, which only a plan needs.
    csgraph = importlib.import_module("scipy.sparse.csgraph")
    csr_array = importlib.import_module("scipy.sparse").csr_array
    residual = csr_array((capacities, (arcs[:, 0], arcs[:, 1])), (nodes, nodes))
    for shift in reversed(range(0, _BITS, bits)):
        coarse = np.minimum(residual.data >> shift, largest).astype(np.int32)
        network = csr_array((coarse, residual.indices, residual.indptr), residual.shape)
        flow = csgraph.maximum_flow(network, 0, 1).flow.astype(np.int64)
        flow.data <<= shift
        residual = residual - flow
    is_on_sink_side = np.zeros(nodes, bool)
    reached = csgraph.breadth_first_order(residual.T.tocsr(), 1, return_predecessors=False)
    is_on_sink_side[reached] = True
    return is_on_sink_side
