"""How many bytes a plan keeps alive at each moment, and what it computes again.

A plan cuts a program into segments. What a segment's own backward pass reads is either kept, or
computed again when the backward pass arrives at the segment, or at what alone reads it, from what
the plan saves inside it and from what came into it. A value that leaves a segment is kept until the
backward pass of the first later segment that reads it is over; but if one segment alone reads it,
and only in its forward pass, it goes with that one. Within a segment memory is freed as soon as
nothing in it reads it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from tracegrad.planning.model import MemoryModel


@dataclass(frozen=True)
class Segment:
    """The operations from `start` up to `stop`.

    `recompute`: whether its backward pass computes again what it reads, but for `saved`; else all
    of that is kept. `step`: that of the model's `steps` as which its scans are run.
    """

    start: int
    stop: int
    recompute: bool = False
    saved: frozenset[int] = frozenset()
    step: int = 0

    def shifted(self, by: int) -> Segment:
        """The same, so many operations later."""
        saved = frozenset([v + by for v in self.saved])
        return replace(self, start=self.start + by, stop=self.stop + by, saved=saved)


@dataclass(frozen=True)
class Local:
    """What a segment does by itself; positions count from its start.

    Attributes:
      flops: extra FLOPs.
      recomputed: the operations that are run again, in order.
      late: those of them that wait for the step back of one operation, and that.
      stored: what is kept from its forward to its backward pass.
      staying: bytes of that, and of what is kept beside buffers.
      unread: bytes that came into it and go with its forward pass.
      forward: bytes of its own buffers alive at each operation.
      backward: bytes of its own buffers and of cotangents alive at each step, the last one first.
    """

    flops: int
    recomputed: tuple[int, ...]
    late: dict[int, int]
    stored: frozenset[int]
    staying: int
    unread: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]


class Piece:
    """The operations of a segment, numbered from its start; what came into it is left out."""

    def __init__(self, model: MemoryModel, start: int, stop: int):
        within = range(start, stop)
        self.sizes = model.sizes[start:stop]
        self.flops = model.flops[start:stop]
        self.again = sum(model.again[start:stop])
        self.extra = model.extra[start:stop]
        self.beside = model.beside[start:stop]
        self.args = [[v - start for v in model.args[i] if v >= start] for i in within]
        self.needs = [[v - start for v in model.needs[i] if v >= start] for i in within]
        self.cotangents = model.cotangents[start:stop]
        self.uses = [[u - start for u in model.uses[i]] for i in within]
        self.leaves = [bool(uses) and uses[-1] >= stop - start for uses in self.uses]
        self.needed = sorted({v for found in self.needs for v in found})
        read_back = {v for i in within for v in model.needs[i]}
        came = sorted(read_back.union(*(model.args[i] for i in within)).difference(within))
        uses = [(v, model.uses[v][0], model.uses[v][-1]) for v in came if model.sizes[v]]
        alone = [v for v, first, last in uses if start <= first and last < stop]
        given = [v for v in alone if v not in read_back]
        self.given = [(model.sizes[v], tuple([u - start for u in model.uses[v]])) for v in given]
        # If it is kept: what its steps read, and the bytes that go with its forward pass.
        behind = [model.behind[i] for i in within]
        pairs = zip(self.needs, behind, strict=True)
        self.needs_kept = [[*found, *[v - start for v in b if v >= start]] for found, b in pairs]
        come_back = {v for more in behind for v in more}
        self.unread_kept = sum([model.sizes[v] for v in given if v not in come_back])
        # In the forward pass: where each value is read last.
        self._last = list(range(stop - start))
        for i, found in enumerate(self.args):
            for v in found:
                self._last[v] = i

    def left(self, stored: AbstractSet[int]) -> list[int]:
        """What others read and the segment does not keep for itself."""
        return [v for v, leaves in enumerate(self.leaves) if leaves and v not in stored]

    def run(self, way: Segment) -> Local:
        """Simulates it; positions in the segment count from its start."""
        # Those that keep something beside buffers are run again in any case.
        saved = {v for v in way.saved if not self.extra[v]}
        ran = self._recomputed(saved) if way.recompute else set()
        again = tuple(sorted(ran))
        needs = self.needs if way.recompute else self.needs_kept
        reads = [0] * len(self.sizes)
        for found in [*needs, *[self.args[i] for i in again]]:
            for v in found:
                reads[v] += 1
        stored = frozenset([v for v, count in enumerate(reads) if count and v not in ran])
        size, made = sum([self.sizes[v] for v in stored]), sum(self.beside)
        staying = size if way.recompute else size + made + sum(self.extra)
        unread = [size for size, readers in self.given if ran.isdisjoint(readers)]
        live = size + made if way.recompute else staying
        late = self._late(ran)
        lates = [{}, late] if late else [{}]
        backward = [self._backward(again, late, needs, reads.copy(), live) for late in lates]
        best = min(range(len(lates)), key=lambda k: max(backward[k]))
        return Local(
            flops=self.again + sum([self.flops[i] for i in again]),
            recomputed=again,
            late=lates[best],
            stored=stored,
            staying=staying,
            unread=sum(unread) if way.recompute else self.unread_kept,
            forward=self._forward(stored, way.recompute),
            backward=backward[best],
        )

    def _recomputed(self, saved: AbstractSet[int]) -> set[int]:
        """The operations that must run again so that everything is there that the backward pass
        reads, but what is saved."""
        again: set[int] = set()
        pending = [v for v in self.needed if v not in saved]
        pending += [i for i, extra in enumerate(self.extra) if extra]
        while pending:
            i = pending.pop()
            if i not in again:
                again.add(i)
                pending += [v for v in self.args[i] if v not in saved]
        return again

    def _late(self, ran: AbstractSet[int]) -> dict[int, int]:
        """Of what is run again that which one operation alone reads that is not, or what waits for
        that one reads: it need not be there before that one's step back, if another comes first."""
        late: dict[int, int] = {}
        first = max((i for i, needs in enumerate(self.needs) if needs), default=0)
        for v in sorted(ran, reverse=True):
            reader, *others = {late.get(u, u) for u in self.uses[v] if u != v} or {first}
            can_wait = not others and reader < first and reader not in ran
            if can_wait and reader not in self.needs[reader] and not self.extra[v]:
                late[v] = reader
        return late

    def _backward(
        self,
        again: Sequence[int],
        late: Mapping[int, int],
        needs: Sequence[Sequence[int]],
        reads: list[int],
        live: int,
    ) -> tuple[int, ...]:
        """Bytes alive at each step; `live`: before the first. What is run again is so when the
        cotangents arrive, since it has a barrier in common with them, and XLA does not put off what
        it could compute; but what is `late`, when those of its reader do."""
        sizes, extra = self.sizes, self.extra
        order = [(-late.get(i, len(sizes)), False, i) for i in again]
        order += [(-i, True, i) for i in range(len(sizes))]
        # An operation, whether its step is taken or it is run again, and what is read for that.
        events = [(i, back, (needs if back else self.args)[i]) for _, back, i in sorted(order)]
        peak, peaks = 0, []
        for i, is_back, operands in events:
            if not is_back:
                live += sizes[i] + extra[i]
            if live > peak:
                peak = live
            for v in operands:
                reads[v] -= 1
                if reads[v] == 0:
                    live -= sizes[v]
            if is_back:
                live -= extra[i] + self.beside[i]
                peaks.append(peak + self.cotangents[i])
                peak = 0
            else:
                live -= 0 if reads[i] else sizes[i]  # run for its extra bytes alone
        return tuple(peaks)

    def _forward(self, stored: AbstractSet[int], recompute: bool) -> tuple[int, ...]:
        sizes, freed = self.sizes, [0] * len(self.sizes)
        for v, at in enumerate(self._last):
            freed[at] += 0 if self.leaves[v] or v in stored else sizes[v]
        live, peaks = 0, []
        for i, size in enumerate(sizes):
            live += size if recompute else size + self.extra[i] + self.beside[i]
            peaks.append(live)
            live -= freed[i]
        return tuple(peaks)


# ------------------------------------------------------------------------------------ whole plans


@dataclass(frozen=True)
class Simulation:
    """What a plan costs. `forward` and `backward` are bytes alive, in the order of execution."""

    peak: int
    residual: int
    flops: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    locals: tuple[Local, ...]
    peaks: tuple[int, ...]  # of each segment


def simulate(model: MemoryModel, plan: Sequence[Segment]) -> Simulation:
    """Runs a plan: its segments are in order and cover the program."""
    kept = 0  # bytes of all that earlier segments leave behind, for the forward pass
    staying = 0  # and of that what is there in a segment's backward pass
    # What they leave and do not keep for themselves: what reads it first, after whose segment it
    # goes, and the bytes.
    waiting: list[tuple[int, int]] = []
    forward: list[int] = []
    backward: list[list[int]] = []
    found, peaks = [], []
    for segment in plan:
        start, stop = segment.start, segment.stop
        piece = Piece(model.steps[segment.step], start, stop)
        local = piece.run(segment.shifted(-start))
        left = [
            (next(u for u in model.uses[start + v] if u >= stop), piece.sizes[v])
            for v in piece.left(local.stored)
        ]
        staying += sum(size for first, size in waiting if first < stop)
        waiting = [(first, size) for first, size in waiting if first >= stop]
        staying -= local.unread
        forward += [kept + size for size in local.forward]
        backward.append([staying + size for size in local.backward])
        peaks.append(max(kept + max(local.forward), staying + max(local.backward)))
        staying += local.staying
        waiting += left
        kept += local.staying + sum(size for _, size in left) - local.unread
        found.append(local)
    return Simulation(
        peak=max(peaks, default=0),
        residual=kept,
        flops=sum(local.flops for local in found),
        forward=tuple(forward),
        backward=tuple(size for steps in reversed(backward) for size in steps),
        locals=tuple(found),
        peaks=tuple(peaks),
    )


def plan_to_keep(model: MemoryModel) -> list[Segment]:
    """The plan that recomputes nothing; a program that writes no buffer has no segment."""
    return [Segment(0, len(model))] if len(model) else []


def keep_all(model: MemoryModel) -> Simulation:
    """The program with nothing recomputed."""
    return simulate(model, plan_to_keep(model))
