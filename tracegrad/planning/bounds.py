"""What no plan can be below: bytes of the peak, and extra FLOPs within a budget.

At any step of the backward pass what is alive fits the budget, and what the step itself reads and
writes is alive. What is needed from there on and is not alive must be run again. The cheapest
choice is a knapsack problem; for every price of a byte, the minimum cut less the price of the
budget is at most its value (Lagrange).

What a scan keeps is left out: it could be run in other ways, of which each keeps something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tracegrad import _jax
from tracegrad.differentiation.activity import active_in_body
from tracegrad.planning.cuts import Network
from tracegrad.planning.flatten import flatten
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.modelling import model


def lowest_peak_bound(whole: MemoryModel) -> int:
    """Bytes that any plan needs: what one step of the backward pass reads and writes."""
    return max(_step_bytes(whole), default=0)


def flops_bound(whole: MemoryModel, budget: int) -> int:
    """Extra FLOPs that any plan within a budget (bytes) needs."""
    best, step_bytes = 0.0, _step_bytes(whole)
    for at in _moments(whole, step_bytes):
        if (room := budget - step_bytes[at]) >= 0:
            outside = [i for i in range(at + 1) if not _is_scan(whole, i)]
            needed = {v for i in outside for v in whole.needs[i]}
            free = {*whole.needs[at]} if _is_scan(whole, at) else {at, *whole.needs[at]}
            network = Network(whole.sizes, whole.flops, whole.args, needed, free=free)
            best = max(best, _least_flops(network, room))
    return int(best)


def _least_flops(network: Network, room: int) -> float:
    """Lagrange's bound for the cheapest choice that keeps so many bytes.""" ""
    above, below = network.cut(0.0), network.cut(math.inf)
    if below.bytes > room:
        return 0.0
    best = above.value
    # The bound is concave in the price, and best where cuts of both sides of the room cost as much.
    while above.bytes > room:
        price = (below.flops - above.flops) / (above.bytes - below.bytes)
        cut = network.cut(price)
        best = max(best, cut.value - price * room)
        if cut.bytes in (above.bytes, below.bytes):
            break
        above, below = (cut, below) if cut.bytes > room else (above, cut)
    return best


def _moments(whole: MemoryModel, step_bytes: Sequence[int]) -> list[int]:
    """Steps that read and write much while nearly all that is kept is still there: one of each of
    ever longer stretches, from the last operation, whose backward step comes first; and the one
    that comes before the backward pass of the scan that keeps most."""
    steps: list[int] = []
    stop, length = len(whole), 8
    while stop > 0:
        start = max(0, stop - length)
        steps.append(max(range(start, stop), key=step_bytes.__getitem__))
        stop, length = start, 4 * length
    if scans := [i for i in range(len(whole)) if _is_scan(whole, i)]:
        steps.append(min(max(scans, key=whole.extra.__getitem__) + 1, len(whole) - 1))
    return steps


def _is_scan(whole: MemoryModel, operation: int) -> bool:
    return bool(whole.nodes) and whole.nodes[operation].primitive is _jax.SCAN


def _step_bytes(whole: MemoryModel) -> list[int]:
    """What each step of the backward pass reads and writes; of a scan, whose insides a plan may
    change, what it does so outside, and what one iteration needs at least."""
    found = []
    for i, needs in enumerate(whole.needs):
        if not _is_scan(whole, i):
            size = whole.cotangents[i] + whole.extra[i] + whole.beside[i]
            found.append(size + sum(whole.sizes[v] for v in needs))
            continue
        found.append(sum(whole.sizes[v] for v in needs if v != i))
        if whole.extra[i]:
            body = flatten(whole.nodes[i].regions["jaxpr"])
            active = active_in_body(whole.nodes[i], body, whole.active)
            found[i] += lowest_peak_bound(model(body, active=active, residuals=whole.residuals))
    return found
