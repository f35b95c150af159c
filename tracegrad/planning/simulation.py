"""Simulates a plan: the bytes alive at each operation, and the operations that are recomputed.

A plan cuts a program into segments. A value that a segment's backward pass reads is either kept
or recomputed, from the segment's inputs and the values that the plan saves in the segment. It is
recomputed when the backward pass reaches the segment or, if a single operation reads the value,
when the backward pass reaches that operation. A value that leaves a segment is kept until the
end of the backward pass of the first later segment that reads it. If a single segment reads the
value, and only in its forward pass, the value is freed at the end of that forward pass. Within a
segment, a value is freed after the segment's last read of it.

Buffers and their costs (`needs`, `extra`, `beside`, `uses`) are those of `MemoryModel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from tracegrad.planning.model import MemoryModel


@dataclass(frozen=True)
class Segment:
    """The operations from `start` to `stop` (exclusive).

    With `recompute`, the backward pass recomputes the values that it reads, except the values in
    `saved`; otherwise the segment keeps these values. `step` is an index in the model's `steps`:
    the segment runs scans as that model says.
    """

    start: int
    stop: int
    recompute: bool = False
    saved: frozenset[int] = frozenset()
    step: int = 0

    def shifted(self, by: int) -> Segment:
        """Moves all positions by `by`, which may be negative."""
        saved = frozenset([v + by for v in self.saved])
        return replace(self, start=self.start + by, stop=self.stop + by, saved=saved)


@dataclass(frozen=True)
class Local:
    """The costs of one segment; positions count from the segment's start.

    Attributes:
      flops: the FLOPs of recomputation.
      recomputed: the operations that are recomputed, in order.
      late: maps a recomputed operation that is postponed to the operation whose backward step it
        waits for.
      stored: the values that are kept from the forward to the backward pass.
      staying: bytes of `stored`; without recomputation, also the bytes of `extra` and `beside`.
      unread: bytes of inputs of the segment that are freed at the end of its forward pass.
      forward: bytes of the segment's own buffers alive at each operation of its forward pass.
      backward: bytes of the segment's own buffers and of cotangents alive at each backward step;
        the step of the last operation comes first.
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
    """The operations of a segment, numbered from its start. `args` and `needs` omit the values that
    are computed before the segment; a later operation that reads a value counts as the stop. Pieces
    are equal if they run alike."""

    def __init__(self, model: MemoryModel, start: int, stop: int):
        def inside(values: Sequence[int]) -> tuple[int, ...]:
            return tuple([v - start for v in values if v >= start])

        within = slice(start, stop)
        self.sizes = tuple(model.sizes[within])
        self.flops = tuple(model.flops[within])
        self.inner_flops = sum(model.inner_flops[within])
        self.extra = tuple(model.extra[within])
        self.beside = tuple(model.beside[within])
        self.is_fixed = any(model.fixed[within])
        self.args = tuple(map(inside, model.args[within]))
        self.needs = tuple(map(inside, model.needs[within]))
        self.cotangents = tuple(model.cotangents[within])
        uses = [sorted({min(u, stop) for u in uses}) for uses in model.uses[within]]
        self.uses = tuple(map(inside, uses))
        # The inputs that only the segment's forward pass reads: the bytes, and the readers.
        read = set[int]().union(*model.args[within]).difference(*model.needs[within])
        inputs = [(model.sizes[v], model.uses[v]) for v in sorted(read) if v < start]
        self.forward_inputs = tuple(
            [(n, inside(u)) for n, u in inputs if n and start <= u[0] <= u[-1] < stop]
        )
        self._key = tuple(vars(self).values())
        self.leaves = [bool(uses) and uses[-1] == stop - start for uses in self.uses]
        self.needed = sorted({v for needs in self.needs for v in needs})
        # The last operation in the segment that reads each value; the value's own if none does.
        self._last = list(range(stop - start))
        for i, args in enumerate(self.args):
            for v in args:
                self._last[v] = i

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Piece) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def leaving(self, stored: AbstractSet[int]) -> list[int]:
        """Returns the values that leave the segment and are not in `stored`."""
        return [v for v, leaves in enumerate(self.leaves) if leaves and v not in stored]

    def run(self, way: Segment) -> Local:
        """Simulates the operations as `way` says. Positions in `way` count from the start of this
        piece."""
        # Recomputation includes every operation with `extra` bytes, so saving it is useless.
        saved = {v for v in way.saved if not self.extra[v]}
        recomputed = self._find_recomputed(saved) if way.recompute else set()
        order = tuple(sorted(recomputed))
        reads = [0] * len(self.sizes)
        for values in [*self.needs, *[self.args[i] for i in order]]:
            for v in values:
                reads[v] += 1
        stored = frozenset([v for v, count in enumerate(reads) if count and v not in recomputed])
        size, beside = sum([self.sizes[v] for v in stored]), sum(self.beside)
        staying = size if way.recompute else size + beside + sum(self.extra)
        unread = [size for size, readers in self.forward_inputs if recomputed.isdisjoint(readers)]
        live = size + beside if way.recompute else staying
        late = self._find_late(recomputed)
        waits = [{}, late] if late else [{}]
        backward = [self._backward_peaks(order, late, reads.copy(), live) for late in waits]
        best = min(range(len(waits)), key=lambda k: max(backward[k]))
        return Local(
            flops=self.inner_flops + sum([self.flops[i] for i in order]),
            recomputed=order,
            late=waits[best],
            stored=stored,
            staying=staying,
            unread=sum(unread),
            forward=self._forward_peaks(stored, way.recompute),
            backward=backward[best],
        )

    def _find_recomputed(self, saved: AbstractSet[int]) -> set[int]:
        """Returns the operations to recompute: the operations with `extra` bytes; the values that
        the backward pass reads and that are not in `saved`; and the values that these need."""
        recomputed: set[int] = set()
        pending = [v for v in self.needed if v not in saved]
        pending += [i for i, extra in enumerate(self.extra) if extra]
        while pending:
            i = pending.pop()
            if i not in recomputed:
                recomputed.add(i)
                pending += [v for v in self.args[i] if v not in saved]
        return recomputed

    def _find_late(self, recomputed: AbstractSet[int]) -> dict[int, int]:
        """Maps each recomputed operation that can wait to the operation that it waits for.

        An operation can wait for the backward step of its reader if it has a single reader and this
        reader is not recomputed. A reader that waits itself counts as the operation that it waits
        for. Another backward step must come first, the reader's backward step must not read the
        reader's result, and the operation must have no `extra` bytes.
        """
        late: dict[int, int] = {}
        first = max((i for i, needs in enumerate(self.needs) if needs), default=0)
        for v in sorted(recomputed, reverse=True):
            reader, *others = {late.get(u, u) for u in self.uses[v] if u != v} or {first}
            can_wait = not others and reader < first and reader not in recomputed
            if can_wait and reader not in self.needs[reader] and not self.extra[v]:
                late[v] = reader
        return late

    def _backward_peaks(
        self,
        recomputed: Sequence[int],
        late: Mapping[int, int],
        reads: list[int],
        live: int,
    ) -> tuple[int, ...]:
        """Returns the peak bytes alive at each backward step; `live` bytes are alive before the
        first step.

        Operations are recomputed when the segment's cotangents arrive: a barrier makes them wait
        for the cotangents, and XLA does not postpone operations that it can run. An operation in
        `late` is recomputed when the cotangents of its reader arrive.
        """
        sizes, extra, beside = self.sizes, self.extra, self.beside
        # For each operation, the operations that are recomputed just before its backward step.
        # Nothing in `late` waits for the last operation, whose backward step is the first.
        before: dict[int, list[int]] = {}
        for i in recomputed:
            before.setdefault(late.get(i, len(sizes) - 1), []).append(i)
        peaks = []
        for step in reversed(range(len(sizes))):
            peak = 0
            for i in before.get(step, ()):
                live += sizes[i] + extra[i]
                if live > peak:
                    peak = live
                for v in self.args[i]:
                    reads[v] -= 1
                    if not reads[v]:
                        live -= sizes[v]
                if not reads[i]:  # it ran for its `extra` bytes
                    live -= sizes[i]
            peaks.append(max(peak, live) + self.cotangents[step])
            for v in self.needs[step]:
                reads[v] -= 1
                if not reads[v]:
                    live -= sizes[v]
            live -= extra[step] + beside[step]
        return tuple(peaks)

    def _forward_peaks(self, stored: AbstractSet[int], recompute: bool) -> tuple[int, ...]:
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
    """The costs of a plan. `residual` is the bytes kept after the forward pass; `forward` and
    `backward` are the bytes alive at each operation, in the order of execution."""

    peak: int
    residual: int
    flops: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    locals: tuple[Local, ...]
    peaks: tuple[int, ...]  # the peak of each segment


def simulate(model: MemoryModel, plan: Sequence[Segment]) -> Simulation:
    """Simulates a plan, whose segments are in order and cover the program."""
    kept = 0  # bytes of earlier segments that are alive in a segment's forward pass
    staying = 0  # bytes of earlier segments that are alive in a segment's backward pass
    # For each value that leaves an earlier segment and is not in its `stored`: the first operation
    # that reads the value, and the value's bytes. The value is freed after the backward pass of
    # that operation's segment.
    waiting: list[tuple[int, int]] = []
    forward: list[int] = []
    backward: list[list[int]] = []
    locals_, peaks = [], []
    for segment in plan:
        start, stop = segment.start, segment.stop
        piece = Piece(model.steps[segment.step], start, stop)
        local = piece.run(segment.shifted(-start))
        leaving = [
            (next(u for u in model.uses[start + v] if u >= stop), piece.sizes[v])
            for v in piece.leaving(local.stored)
        ]
        staying += sum(size for first, size in waiting if first < stop)
        waiting = [(first, size) for first, size in waiting if first >= stop]
        staying -= local.unread
        forward += [kept + size for size in local.forward]
        backward.append([staying + size for size in local.backward])
        peaks.append(max(kept + max(local.forward), staying + max(local.backward)))
        staying += local.staying
        waiting += leaving
        kept += local.staying + sum(size for _, size in leaving) - local.unread
        locals_.append(local)
    return Simulation(
        peak=max(peaks, default=0),
        residual=kept,
        flops=sum(local.flops for local in locals_),
        forward=tuple(forward),
        backward=tuple(size for steps in reversed(backward) for size in steps),
        locals=tuple(locals_),
        peaks=tuple(peaks),
    )


def plan_to_keep(model: MemoryModel) -> list[Segment]:
    """Returns the plan that keeps everything; without operations it has no segment."""
    return [Segment(0, len(model))] if len(model) else []


def keep_all(model: MemoryModel) -> Simulation:
    return simulate(model, plan_to_keep(model))
