"""What no plan can be below: bytes of the peak, and extra FLOPs within a budget.

At any step of the backward pass what is alive fits the budget, and what the step itself reads and
writes is alive. What is needed from there on and is not alive must be run again. The cheapest
choice is a knapsack problem; for every price of a byte, the minimum cut less the price of the
budget is at most its value (Lagrange).

Scans are written out for that: a plan may keep of their bodies what it likes, in each iteration
something else. Whatever it does is a choice for each iteration; the mean of these is a (fractional)
choice for one body whose bytes and FLOPs count once for each iteration, and of fractional choices
none is cheaper than the minimum cut, since that problem has whole solutions (total unimodularity).
What an iteration reads of the one before it is taken to come of the same body. This holds for all
but the first, and for that as well if the first carry is kept, too: so there is as much more room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tracegrad import _jax
from tracegrad.ir import Graph, Literal, Node, Value
from tracegrad.planning.activity import active_in_body
from tracegrad.planning.cuts import Network
from tracegrad.planning.flatten import flatten
from tracegrad.planning.flops import node_flops, size_of
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.modelling import model, node_reads
from tracegrad.planning.residuals import Residuals, nbytes

MOMENTS = 4
PRICES = 24


def lowest_peak_bound(whole: MemoryModel) -> int:
    """Bytes that any plan needs: what one step of the backward pass reads and writes."""
    steps = range(len(whole))
    return max((step_bytes(whole, i) + _body_bytes(whole, i) for i in steps), default=0)


def flops_bound(whole: MemoryModel, budget: int) -> int:
    """Extra FLOPs that any plan within a budget (bytes) needs."""
    return FlopsBound(whole)(budget)


class FlopsBound:
    """`flops_bound` of one program, for any number of budgets."""

    def __init__(self, whole: MemoryModel):
        self.model = whole
        self._has_scans = any(_is_scan(whole, i) for i in range(len(whole)))
        self._program = _WrittenOut(whole) if self._has_scans else _Program.of(whole)
        self._moments = _moments(whole)
        self._networks: dict[int, Network] = {}

    def __call__(self, budget: int) -> int:
        best = 0.0
        for at in self._moments:
            room = budget - step_bytes(self.model, at)
            if room >= 0:
                network = self._network(at)
                first = sum(self._program.first_carries.get(v, 0) for v in network.values)
                best = max(best, _least_flops(network, room + first))
        return int(best)

    def _network(self, at: int) -> Network:
        """The choice that there is at a step."""
        if at not in self._networks:
            program = self._program
            needed = {v for i in range(at + 1) for v in program.needs[i]}
            free = {v for i in self.model.needs[at] if i != at for v in program.written[i]}
            if not _is_scan(self.model, at):
                free |= {*program.needs[at], *program.written[at]}
            self._networks[at] = Network(program, needed, free=free)
        return self._networks[at]


def _least_flops(network: Network, room: int) -> float:
    """Lagrange's bound for the cheapest choice that keeps so many bytes."""
    best, low, high = 0.0, 0.0, None
    price = 2.0 * network.flops / max(1, room)
    # The bound is concave in the price; its slope is the bytes saved less the room.
    for _ in range(PRICES if network.values else 0):
        cut = network.cut(price)
        best = max(best, cut.value - price * room)
        if cut.bytes > room:
            low = price
            price = price * 4 if high is None else (low + high) / 2
        elif cut.bytes < room:
            high = price
            price = (low + high) / 2
        else:
            break
    return best


def _moments(whole: MemoryModel) -> list[int]:
    """Steps that read and write much while nearly all that is kept is still there: one of each of
    ever longer stretches, from the last operation, whose backward step comes first; and those that
    come before the backward passes of scans."""
    steps: list[int] = []
    stop, length = len(whole), 8
    while stop > 0 and len(steps) < MOMENTS:
        start = max(0, stop - length)
        steps.append(max(range(start, stop), key=lambda i: step_bytes(whole, i)))
        stop, length = start, 4 * length
    scans = [i for i in range(len(whole)) if _is_scan(whole, i)]
    scans = sorted(scans, key=lambda i: -whole.extra[i])[:MOMENTS]
    steps += [min(i + 1, len(whole) - 1) for i in scans]
    return list(dict.fromkeys(steps))


def _is_scan(whole: MemoryModel, operation: int) -> bool:
    return bool(whole.nodes) and whole.nodes[operation].primitive is _jax.SCAN


def step_bytes(whole: MemoryModel, step: int) -> int:
    """What a step of the backward pass reads and writes; of a scan, whose insides a plan may
    change, what it does so outside."""
    needs = whole.needs[step]
    if _is_scan(whole, step):
        waiting = whole.gathered[step + 1] if step + 1 < len(whole) else 0
        return sum(whole.sizes[v] for v in needs if v != step) + waiting
    reads = sum(whole.sizes[v] for v in needs)
    return reads + whole.cotangents[step] + whole.gathered[step] + whole.extra[step]


def _body_bytes(whole: MemoryModel, step: int) -> int:
    """What one iteration of a scan needs at least for its backward pass."""
    if not _is_scan(whole, step) or not whole.extra[step]:
        return 0
    scan = whole.nodes[step]
    body = flatten(scan.regions["jaxpr"])
    active = active_in_body(scan, body, whole.active)
    return lowest_peak_bound(model(body, active=active, residuals=whole.residuals))


# ---------------------------------------------------------------------------------- written out


@dataclass
class _Program:
    """Values with the FLOPs of computing each from others.

    `needs`: for each operation of a model what its step of the backward pass reads; `written`: what
    is there if its buffer is. `first_carries`: what scans read of an iteration before, with the
    bytes that are there for their first one.
    """

    sizes: list[int]
    flops: list[int]
    args: list[tuple[int, ...]]
    needs: Sequence[Iterable[int]]
    written: Sequence[Sequence[int]]
    first_carries: dict[int, int]

    @staticmethod
    def of(whole: MemoryModel) -> _Program:
        written = [(i,) for i in range(len(whole))]
        return _Program(whole.sizes, whole.flops, whole.args, whole.needs, written, {})


@dataclass(frozen=True)
class _Place:
    """Of a value in a graph: its number, None for one that is there in any case; and how often
    there is another of it, in all iterations of the scans around it."""

    number: int | None
    times: int


class _WrittenOut(_Program):
    """A program with its scans written out at every depth: an operation of the body stands for
    those of all iterations.

    Any value may be kept here, also one that is no buffer and one that JAX's rule of an operation
    makes; what is next to nothing to compute costs no FLOPs. So whatever JAX keeps of a body is
    among the choices.
    """

    def __init__(self, whole: MemoryModel):
        assert whole.graph is not None
        count = len(whole)
        self._needs: list[set[int]] = [set() for _ in range(count)]
        self._written: list[list[int]] = [[] for _ in range(count)]
        super().__init__([], [], [], self._needs, self._written, {})
        self._residuals = whole.residuals
        self._flops_known: dict[Graph, int] = {}
        graph = whole.graph
        number = {node: i for i, node in enumerate(whole.nodes)}
        step = -1
        steps = {}
        for node in graph.nodes:
            step = number.get(node, step)
            steps[node] = max(step, 0)
        places = dict.fromkeys((*graph.inputs, *graph.constants), _Place(None, 1))
        self._write(graph, whole.active, places, steps)
        for i, node in enumerate(whole.nodes):
            found = [places[v].number for v in node.outputs]
            self._written[i] += [v for v in found if v is not None]

    def _add(self, size: int, flops: int, args: Iterable[int | None]) -> int:
        self.sizes.append(size)
        self.flops.append(flops)
        self.args.append(tuple(sorted({v for v in args if v is not None})))
        return len(self.sizes) - 1

    def _write(
        self,
        graph: Graph,
        active: Collection[Value],
        places: dict[Value, _Place],
        steps: dict[Node, int],
    ) -> None:
        """Adds the nodes of a graph; `places` has its inputs', and gets those of all values."""
        read, free = node_reads(graph, active, self._residuals)
        for node in graph.nodes:
            if node.primitive is _jax.SCAN:
                self._write_scan(node, active, places, steps[node])
                continue
            at = [_place(v, places) for v in node.inputs]
            times = max((place.times for place in at), default=1)
            flops = 0 if node in free else times * node_flops(node, self._flops_known)
            size = times * sum(nbytes(v.aval) for v in node.outputs)
            run = self._add(size, flops, (place.number for place in at))
            results = [run]
            if len(node.outputs) > 1:  # some may be kept without the others
                results = [self._add(times * nbytes(v.aval), 0, [run]) for v in node.outputs]
            for value, result in zip(node.outputs, results, strict=True):
                places[value] = _Place(result, times)
            if node in read:
                operands = [place.number for place in at]
                self._read(node, read[node], run, operands, results, times, steps[node])

    def _read(
        self,
        node: Node,
        residuals: Residuals,
        run: int,
        operands: Sequence[int | None],
        results: Sequence[int],
        times: int,
        step: int,
    ) -> None:
        """Adds what the backward pass of a node reads."""
        numbers: list[int | None] = []
        for derived in residuals.derived:
            if derived.is_extra and node.regions:
                numbers.append(None)  # what is done inside could be planned by itself
                continue
            args = [operands[i] for i in derived.operands] + [results[i] for i in derived.results]
            args += [numbers[i] for i in derived.derived]
            if derived.is_extra:
                args = [run]
            numbers.append(self._add(times * derived.size, 0, args))
            if derived.is_read:
                self._needs[step].add(len(self.sizes) - 1)

    def _write_scan(
        self, scan: Node, active: Collection[Value], places: dict[Value, _Place], step: int
    ) -> None:
        body = flatten(scan.regions["jaxpr"])
        constants, carried = _jax.scan_split(scan.params)
        outside = [_place(v, places) for v in scan.inputs]
        around = max((place.times for place in outside), default=1)
        times = around * size_of(scan.params["length"])
        inside = dict.fromkeys(body.constants, _Place(None, 1))
        for i, (value, place) in enumerate(zip(body.inputs, outside, strict=True)):
            if i < constants:
                inside[value] = place
            elif i < constants + carried:
                size = nbytes(value.aval)
                inside[value] = _Place(self._add(times * size, 0, ()), times)
                self.first_carries[len(self.sizes) - 1] = around * size
            else:
                inside[value] = _Place(place.number, times)
        here = active_in_body(scan, body, active)
        self._write(body, here, inside, dict.fromkeys(body.nodes, step))
        ends = [_place(v, inside).number for v in body.outputs]
        for value, end in zip(body.inputs[constants : constants + carried], ends, strict=False):
            carry = inside[value].number
            assert carry is not None
            self.args[carry] = () if end is None else (end,)
        for i, (value, end) in enumerate(zip(scan.outputs, ends, strict=True)):
            # The last carry is not that of a mean iteration: it is taken to cost nothing.
            places[value] = _Place(None if i < carried else end, around)


def _place(operand: Value | Literal, places: dict[Value, _Place]) -> _Place:
    return places[operand] if isinstance(operand, Value) else _Place(None, 1)
