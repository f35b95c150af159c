"""What a compiled program holds at its peak, buffer by buffer.

XLA says which values are in which buffers (`BufferAssignmentProto` of
``xla/service/buffer_assignment.proto``; CPUs and GPUs that are here say so, not every backend
does). From when to when they are there, what is in them and who reads it is followed through the
instructions of the program (`flow`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from tracegrad._jax.flow import Flow, Index, Operation, Part
from tracegrad._jax.hlo import Instruction, Message, decoded, first, module_of, numbers

_HOST = 5  # the number of the host's memory


class Buffer(NamedTuple):
    """Of what is in use at the peak.

    Attributes:
      size: bytes.
      kind: ``argument``, ``result`` or ``temporary``.
      type: of what is in it, ``f32[64,512]``.
      made: what has computed that, where it is known.
      reader: the operation at the peak or after it that reads it next, in a loop maybe in its next
        turn; of what the forward pass makes rather one of the backward pass.
      is_read_back: whether there is one.
      alive: from when to when, as shares of the program.
    """

    size: int
    kind: str
    type: str
    made: Operation | None
    reader: Operation | None
    is_read_back: bool
    alive: tuple[float, float]


class Account(NamedTuple):
    """What is in use at the peak.

    Attributes:
      at: the operation that is there.
      buffers: what is in use.
      timeline: bytes at each instruction.
      constants: bytes of arrays that are written into the program.
    """

    at: Operation | None
    buffers: list[Buffer]
    timeline: tuple[int, ...]
    constants: int


def account_of_buffers(compiled: Any) -> Account | None:
    """The account of a `jax.stages.Compiled`; None where the backend does not tell its buffers."""
    analysis = compiled.memory_analysis()
    message = getattr(analysis, "serialized_buffer_assignment_proto", b"")
    if not message:
        return None
    return _Assignment(Flow(module_of(compiled)), decoded(message)).account()


class _Allocation(NamedTuple):
    number: int
    size: int
    kind: str
    assigned: tuple[tuple[int, int, int], ...]  # the number of a value, its offset, its size


class _Value(NamedTuple):
    """One of the values that share an allocation: what computes it, in which place of which
    allocation it is (number, offset and size), and from which instruction to which."""

    each: Instruction
    part: Index
    slot: tuple[int, int, int]
    first: int
    last: int


def _size(value: _Value) -> int:
    return value.slot[2]


class _Assignment:
    """The buffers of a program, and what is in them."""

    def __init__(self, flow: Flow, assignment: Message):
        self._flow = flow
        self.allocations = [_allocation(decoded(a)) for a in assignment.get(3, ())]
        self._places: dict[int, Part] = {}  # of each value
        for message in map(decoded, assignment.get(1, ())):
            place = decoded(first(message, 3, b""))
            self._places[first(message, 1)] = first(place, 4), tuple(numbers(place, 3))
        self._parts = set(self._places.values())

    def account(self) -> Account:
        values = {allocation: self.values(allocation) for allocation in self.allocations}
        temporary = [v for a in values if a.kind == "temporary" for v in values[a]]
        lasting = {a: v for a, v in values.items() if v and a.kind in ("argument", "result")}
        # An argument is there at first, and a result at last.
        own = {a: v[0 if a.kind == "argument" else -1] for a, v in lasting.items()}
        always = sum(map(_size, own.values()))
        timeline = _timeline(always, temporary, len(self._flow.order))
        moment = max(range(len(timeline)), key=timeline.__getitem__)
        slots = {v.slot: v for v in temporary if v.first <= moment <= v.last}
        buffers = [self._buffer(v, moment, "temporary", _size(v)) for v in slots.values()]
        for allocation, value in own.items():  # in which something else may be at the peak
            there = [v for v in lasting[allocation] if v.first <= moment <= v.last]
            now = value if value in there else max(there, key=_size, default=value)
            now = value if 2 * _size(now) < _size(value) else now
            kind = allocation.kind if now is value else "temporary"
            buffers.append(self._buffer(now, moment, kind, _size(value)))
        constants = sum(a.size for a in self.allocations if a.kind == "constant")
        return Account(self._at(moment), buffers, timeline, constants)

    def _at(self, moment: int) -> Operation | None:
        """The operation that runs at a moment, or has run before it."""
        ran = [key for key, order in self._flow.order.items() if order <= moment]
        found = map(self._flow.operation, reversed(ran))
        return next((each for each in found if each is not None and each.frames), None)

    def values(self, allocation: _Allocation) -> list[_Value]:
        """What is assigned to an allocation, in the order in which it is computed."""
        found = []
        for number, offset, size in allocation.assigned:
            key, part = self._places.get(number, (None, ()))
            if key is None or key not in self._flow.order:
                continue  # of a part that is never run
            each = self._flow.instruction(key)
            if each.type.at(part).kind == "tuple":
                continue  # nothing but addresses
            slot = allocation.number, offset, size
            last = self._flow.last_read(each, part, self._parts)
            # The result of a loop is there when that is over.
            found.append(_Value(each, part, slot, self._flow.over[key], last))
        return sorted(found, key=lambda value: value.first)

    def _buffer(self, value: _Value, moment: int, kind: str, size: int) -> Buffer:
        flow = self._flow
        reads = sorted(flow.readers(value.each, value.part), key=lambda r: flow.order[r.reader.key])
        told = [(flow.order[read.reader.key], flow.reading(read)) for read in reads]
        known = [(order, reader) for order, reader in told if reader is not None]
        later = [reader for order, reader in known if order >= moment]
        if kind == "temporary":  # what is read in the next turn of a loop
            later = later or [reader for _, reader in known]
        back = [reader for reader in later if reader.is_backward]
        made = flow.content(value.each, value.part)
        if made is None or (made.name and not made.path):  # XLA's own: for what reads it
            own = made or Operation(value.each.op, "", (), False)
            made = next((reader for reader in later if reader.path), own)
        end = len(flow.order)
        return Buffer(
            size=size,
            kind=kind,
            type=str(value.each.type.at(value.part)),
            made=made,
            reader=next(iter(later if made.is_backward else back or later), None),
            is_read_back=bool(back),
            alive=(
                0.0 if kind == "argument" else value.first / end,
                (value.last + 1) / end if kind == "temporary" else 1.0,
            ),
        )


def _allocation(message: Message) -> _Allocation:
    kind = "temporary"
    if first(message, 8) == _HOST or first(message, 3):
        kind = "elsewhere"
    elif first(message, 5):
        kind = "argument"
    elif first(message, 12):
        kind = "constant"
    elif first(message, 7):
        kind = "result"
    assigned = map(decoded, message.get(9, ()))
    values = tuple((first(a, 1), first(a, 2), first(a, 3)) for a in assigned)
    return _Allocation(first(message, 1), first(message, 2), kind, values)


def _timeline(always: int, values: Iterable[_Value], count: int) -> tuple[int, ...]:
    """Bytes at each instruction: `always`, and each slot as long as anything is in it."""
    spans: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for value in values:
        spans.setdefault(value.slot, []).append((value.first, value.last))
    changes = [0] * (count + 1)
    for (_, _, size), of_slot in spans.items():
        until = -1
        for start, last in sorted(of_slot):
            if max(start, until + 1) <= last:
                changes[max(start, until + 1)] += size
                changes[last + 1] -= size
                until = last
    return tuple(always + size for size in itertools.accumulate(changes[:count]))
