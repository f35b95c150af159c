"""What a compiled program holds at its peak, buffer by buffer.

XLA says which values are in which buffers (`BufferAssignmentProto` of
``xla/service/buffer_assignment.proto``), on CPUs and, by its source, on GPUs that are here. How
long a value is there, what it is and who reads it is followed through the instructions of the
program (`value_flow`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tracegrad.insight.program_lines import ProgramLines
from tracegrad.insight.value_flow import Buffers, Flow, Operation, Part, Value
from tracegrad.ir.occurrence import Origin
from tracegrad.ir.scopes import UNDER_RULES
from tracegrad.planning.hlo import Message, Module, decoded, first, numbers
from tracegrad.planning.spans import alive

_HOST = 5  # the number of the host's memory

Kind = Literal["argument", "result", "residual", "gradient", "activation"]
_AROUND = (UNDER_RULES, "checkpoint", "rematted_computation")


@dataclass(frozen=True)
class Buffer:
    """A buffer that is in use at the peak.

    Attributes:
      size: bytes.
      kind: ``argument``, ``result``, ``residual`` (of the forward pass, for the backward pass),
        ``gradient`` (of the backward pass) or ``activation``.
      type: the type of the value in it, ``f32[64,512]``.
      line: where the value is computed, ``model.py:12 (Block.__call__)``; "" for an argument.
      origin: that line, where it is known.
      scopes: the names of the scopes around it.
      kept_for: the operation that reads the value next, at the peak or after it (in a loop, maybe
        in the next turn); for a value of the forward pass, the next operation of the backward pass.
      alive: from when to when, as shares of the program.
    """

    size: int
    kind: Kind
    type: str
    line: str
    origin: Origin | None
    scopes: tuple[str, ...]
    kept_for: str
    alive: tuple[float, float]

    @property
    def is_recomputed(self) -> bool:
        """Whether it is in a part that the program recomputes already."""
        return not {"checkpoint", "rematted_computation"}.isdisjoint(self.scopes)

    @property
    def scope(self) -> str:
        """The scopes, for people: without those that rules add, and without those that JAX repeats
        around a recomputed part."""
        own = [name for name in self.scopes if name not in _AROUND]
        if len(own) < len(self.scopes):
            own = own[max((k for k, name in enumerate(own) if name == own[0]), default=0) :]
        return "/".join(own)


class Account(NamedTuple):
    """What is in use at the peak.

    Attributes:
      at: the operation that is there.
      buffers: what is in use.
      timeline: bytes at each instruction.
      constants: bytes of arrays that are written into the program.
    """

    at: str
    buffers: list[Buffer]
    timeline: tuple[int, ...]
    constants: int


def account_of_buffers(module: Module, analysis: Any, lines: ProgramLines) -> Account:
    """The account of a compiled program, empty where XLA does not say which buffers there are.

    Args:
      module: the program.
      analysis: of `jax.stages.Compiled.memory_analysis`.
      lines: of the graph that was compiled.
    """
    message = getattr(analysis, "serialized_buffer_assignment_proto", b"")
    if not message:
        return Account("", [], (), 0)
    flow = Flow(module)
    assignment = Assignment(flow, decoded(message))
    values = assignment.buffers()
    temporary = [value for of_one in values["temporary"] for value in of_one]
    # An argument is there at first, and a result at last.
    lasting: list[tuple[Kind, Value, Sequence[Value]]] = []
    lasting += [("argument", of_one[0], of_one) for of_one in values["argument"]]
    lasting += [("result", of_one[-1], of_one) for of_one in values["result"]]
    always = sum(value.size for _, value, _ in lasting)
    timeline = bytes_in_use(always, temporary, len(flow.order))
    moment = max(range(len(timeline)), key=timeline.__getitem__)
    slots = {v.slot: v for v in temporary if v.first <= moment <= v.last}
    look = functools.partial(_buffer, flow, lines, moment)
    buffers = [look(value, None, value.size) for value in slots.values()]
    for kind, value, of_one in lasting:  # in which something else may be at the peak
        there = [v for v in of_one if v.first <= moment <= v.last]
        now = value if value in there else max(there, key=lambda v: v.size, default=value)
        now = value if 2 * now.size < value.size else now
        buffers.append(look(now, kind if now is value else None, value.size))
    ran = [key for key, order in flow.order.items() if order <= moment]
    found = map(flow.operation, reversed(ran))
    at = next((each for each in found if each is not None and each.frames), None)
    return Account(lines.told(at), buffers, timeline, assignment.constants)


class _Allocation(NamedTuple):
    number: int
    size: int
    kind: str
    assigned: tuple[tuple[int, int, int], ...]  # the number of a value, its offset, its size


class Assignment:
    """What XLA says of the buffers of a program.

    Attributes:
      constants: bytes of those that are written into the program.
    """

    def __init__(self, flow: Flow, message: Message):
        self._flow = flow
        self._allocations = [_allocation(decoded(a)) for a in message.get(3, ())]
        self._places: dict[int, Part] = {}  # of each value
        for value in map(decoded, message.get(1, ())):
            place = decoded(first(value, 3, b""))
            self._places[first(value, 1)] = first(place, 4), tuple(numbers(place, 3))
        self._parts = set(self._places.values())
        self.constants = sum(a.size for a in self._allocations if a.kind == "constant")

    def buffers(self) -> Buffers:
        """The values of each, in the order in which they are computed, by what it is."""
        found: Buffers = {"argument": [], "result": [], "temporary": []}
        for allocation in self._allocations:
            values = self._values(allocation)
            if values and allocation.kind in found:
                found[allocation.kind].append(values)
        return found

    def _values(self, allocation: _Allocation) -> list[Value]:
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
            found.append(Value(each, part, slot, self._flow.over[key], last))
        return sorted(found, key=lambda value: value.first)


def _buffer(
    flow: Flow, lines: ProgramLines, moment: int, value: Value, lasting: Kind | None, size: int
) -> Buffer:
    """What is in a buffer at a moment; `lasting`: the kind of an argument or a result."""
    reads = sorted(flow.readers(value.each, value.part), key=lambda r: flow.order[r.reader.key])
    told = [(flow.order[read.reader.key], flow.reading(read)) for read in reads]
    known = [(order, reader) for order, reader in told if reader is not None]
    later = [reader for order, reader in known if order >= moment]
    if lasting is None:  # what is read in the next turn of a loop
        later = later or [reader for _, reader in known]
    back = [reader for reader in later if reader.is_backward]
    made = flow.content(value.each, value.part)
    if made is None or (made.name and not made.path):  # XLA's own: for what reads it
        own = made or Operation(value.each.op, "", (), False)
        made = next((reader for reader in later if reader.path), own)
    reader = next(iter(later if made.is_backward else back or later), None)
    kind = lasting or ("gradient" if made.is_backward else "residual" if back else "activation")
    line = ""
    origin: Origin | None = None
    scopes: tuple[str, ...] = ()
    if kind != "argument" and not made.name:
        line = f"copy of {made.path}"
    elif kind != "argument":
        origin, scopes = lines.origin(made), lines.scopes(made)
        line = str(origin or f"XLA's {made.name}")
    end = len(flow.order)
    return Buffer(
        size=size,
        kind=kind,
        type=str(value.each.type.at(value.part)),
        line=line,
        origin=origin,
        scopes=scopes,
        kept_for="what is returned" if kind == "result" else lines.told(reader),
        alive=(
            0.0 if kind == "argument" else value.first / end,
            1.0 if lasting else (value.last + 1) / end,
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


def bytes_in_use(always: int, values: Iterable[Value], count: int) -> tuple[int, ...]:
    """Bytes at each instruction: `always`, and each slot as long as anything is in it."""
    spans: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for value in values:
        spans.setdefault(value.slot, []).append((value.first, value.last))
    apart = []  # those of a slot one behind the other
    for (_, _, size), of_slot in spans.items():
        until = -1
        for start, last in sorted(of_slot):
            if max(start, until + 1) <= last:
                apart.append((max(start, until + 1), last, size))
                until = last
    return tuple(always + size for size in alive(apart, count))
