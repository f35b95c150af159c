"""Lists the buffers that a compiled program holds at its peak.

XLA reports which values are in which buffers (`BufferAssignmentProto` of
``xla/service/buffer_assignment.proto``) on CPUs and, by its source, on the GPUs of this machine.
The instructions of the program tell how long a value is in use, what it is, and which operations
read it (`value_flow`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tracegrad.insight.program_lines import ProgramLines
from tracegrad.insight.value_flow import Operation, Part, ValueFlow
from tracegrad.ir.scopes import UNDER_RULES
from tracegrad.planning.hlo import Message, Module, decoded, first, numbers
from tracegrad.planning.spans import alive

_HOST = 5  # the number of the host's memory space

Kind = Literal["argument", "result", "residual", "gradient", "activation"]
_AROUND = (UNDER_RULES, "checkpoint", "rematted_computation")  # scopes that no user wrote


@dataclass(frozen=True)
class Line:
    """The bytes that one line of the user's code, in one scope, holds at the peak.

    Attributes:
      size: bytes.
      line: ``model.py:12 (Block.__call__)``; "" for arguments and constants.
      scope: the named scopes around the line, ``encoder/block_0``.
      kind: ``argument``, ``result``, ``residual`` (computed in the forward pass, and read in the
        backward pass), ``gradient`` (computed in the backward pass) or ``activation``.
      values: the types of the values, ``6 × f32[512,64]``.
      kept_for: the operation that reads the largest value next, at the peak or after it (in a loop,
        maybe in the next iteration); for a value of the forward pass, the next operation of the
        backward pass that reads it.
    """

    size: int
    line: str
    scope: str
    kind: Kind
    values: str
    kept_for: str


class Account(NamedTuple):
    """The buffers in use at the peak.

    Attributes:
      at: the last operation with a line of code that began before or at the peak.
      buffers: the buffers in use at the peak, each as a line with one value.
      timeline: bytes in use at each instruction.
      constants: bytes of arrays that are part of the program.
    """

    at: str
    buffers: list[Line]
    timeline: tuple[int, ...]
    constants: int


def account_of_buffers(module: Module, analysis: Any, lines: ProgramLines) -> Account:
    """Returns the account of a compiled program, which is empty if XLA does not list its buffers.

    Args:
      module: the program.
      analysis: the result of `jax.stages.Compiled.memory_analysis`.
      lines: the lines of the graph that was compiled.
    """
    message = getattr(analysis, "serialized_buffer_assignment_proto", b"")
    if not message:
        return Account("", [], (), 0)
    flow = ValueFlow(module)
    values, constants = read_assignment(flow, decoded(message))
    temporary = [value for of_one in values["temporary"] for value in of_one]
    # A buffer may hold several values, one after the other. The buffer of an argument holds the
    # argument first, and the buffer of a result holds the result last.
    lasting: list[tuple[Kind, Value, Sequence[Value]]] = []
    lasting += [("argument", of_one[0], of_one) for of_one in values["argument"]]
    lasting += [("result", of_one[-1], of_one) for of_one in values["result"]]
    always = sum(value.size for _, value, _ in lasting)
    timeline = bytes_in_use(always, temporary, len(flow.order))
    moment = max(range(len(timeline)), key=timeline.__getitem__)
    slots = {v.slot: v for v in temporary if v.first <= moment <= v.last}
    look = functools.partial(_buffer, flow, lines, moment)
    buffers = [look(value, None, value.size) for value in slots.values()]
    for kind, value, of_one in lasting:  # its buffer may hold another value at the peak
        there = [v for v in of_one if v.first <= moment <= v.last]
        now = value if value in there else max(there, key=lambda v: v.size, default=value)
        now = value if 2 * now.size < value.size else now
        buffers.append(look(now, kind if now is value else None, value.size))
    ran = [key for key, order in flow.order.items() if order <= moment]
    operations = (made for key in reversed(ran) for made in flow.results(flow.instruction(key)))
    at = next((made for made in operations if made.frames), None)
    return Account(lines.describe(at), buffers, timeline, constants)


class Value(NamedTuple):
    """A value, its place in a buffer, and the instructions between which it is in use.

    Attributes:
      part: the result that is the value.
      type: its type, ``f32[64,512]``.
      slot: the number of its buffer, its offset in the buffer, and its size.
      first, last: the numbers of the first and the last instruction that it is in use at.
    """

    part: Part
    type: str
    slot: tuple[int, int, int]
    first: int
    last: int

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.slot[2]


def read_assignment(flow: ValueFlow, message: Message) -> tuple[dict[str, list[list[Value]]], int]:
    """Reads a `BufferAssignmentProto`, by the numbers of its fields.

    Returns the values of each buffer, in the order of their computation, by the kind of the buffer:
    ``argument``, ``result`` or ``temporary``; and the bytes of arrays that are part of the program.
    """
    places: dict[int, Part] = {}  # by the value's number
    for value in map(decoded, message.get(1, ())):
        place = decoded(first(value, 3, b""))
        places[first(value, 1)] = first(place, 4), tuple(numbers(place, 3))
    found: dict[str, list[list[Value]]] = {"argument": [], "result": [], "temporary": []}
    constants = 0
    for allocation in map(decoded, message.get(3, ())):
        kind, values = _kind_of(allocation), []
        constants += first(allocation, 2) if kind == "constant" else 0
        for assigned in map(decoded, allocation.get(9, ())):
            key, index = places.get(first(assigned, 1), (None, ()))
            if key is None or key not in flow.order:
                continue  # computed by a part that never runs by itself
            of = flow.instruction(key).type.at(index)
            if of.kind == "tuple":
                continue  # a tuple's buffer has only addresses
            slot = first(allocation, 1), first(assigned, 2), first(assigned, 3)
            # The result of a loop exists from the end of the loop on.
            span = flow.over[key], flow.last_read((key, index))
            values.append(Value((key, index), str(of), slot, *span))
        if values and kind in found:
            found[kind].append(sorted(values, key=lambda value: value.first))
    return found, constants


def _kind_of(allocation: Message) -> str:
    if first(allocation, 8) == _HOST or first(allocation, 3):
        return "elsewhere"
    kinds = (5, "argument"), (12, "constant"), (7, "result")
    return next((kind for field, kind in kinds if first(allocation, field)), "temporary")


def _buffer(
    flow: ValueFlow, lines: ProgramLines, moment: int, value: Value, lasting: Kind | None, size: int
) -> Line:
    """Describes a buffer that holds `value` at the instruction `moment`; `lasting`: the kind of the
    buffer of an argument or a result."""
    reads = sorted(flow.reads(value.part), key=lambda read: flow.order[read.reader.key])
    told = [(flow.order[read.reader.key], flow.reading(read)) for read in reads]
    known = [(order, reader) for order, reader in told if reader is not None]
    later = [reader for order, reader in known if order >= moment]
    if lasting is None:  # the next iteration of a loop may read it
        later = later or [reader for _, reader in known]
    back = [reader for reader in later if reader.is_backward]
    made = flow.content(value.part)
    if made is None or (made.name and not made.path):  # XLA put it in: take what reads it
        own = made or Operation(flow.instruction(value.part[0]).op, "", (), False)
        made = next((reader for reader in later if reader.path), own)
    reader = next(iter(later if made.is_backward else back or later), None)
    kind = lasting or ("gradient" if made.is_backward else "residual" if back else "activation")
    line = scope = ""
    if kind != "argument" and not made.name:
        line = f"copy of {made.path}"
    elif kind != "argument":
        scope = _users_scope(lines.scopes(made))
        line = str(lines.origin(made) or f"XLA's {made.name}")
    kept_for = "the result" if kind == "result" else lines.describe(reader)
    return Line(size, line, scope, kind, value.type, kept_for)


def _users_scope(scopes: Sequence[str]) -> str:
    """Joins scopes, without those that rules add, and those that JAX repeats around a recomputed
    part."""
    own = [name for name in scopes if name not in _AROUND]
    if len(own) < len(scopes):
        own = own[max((k for k, name in enumerate(own) if name == own[0]), default=0) :]
    return "/".join(own)


def bytes_in_use(always: int, values: Iterable[Value], count: int) -> tuple[int, ...]:
    """Returns the bytes in use at each instruction: `always`, plus each slot while it holds a
    value."""
    spans: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for value in values:
        spans.setdefault(value.slot, []).append((value.first, value.last))
    apart = []  # spans that do not overlap within a slot
    for (_, _, size), of_slot in spans.items():
        until = -1
        for start, last in sorted(of_slot):
            if max(start, until + 1) <= last:
                apart.append((max(start, until + 1), last, size))
                until = last
    return tuple(always + size for size in alive(apart, count))
