"""What a compiled program holds at its peak, buffer by buffer.

XLA says which buffers it has allotted, and which of them are in use where most are
(`BufferAssignmentProto` of ``xla/service/buffer_assignment.proto``; CPUs say so, not every backend
does). What is in them, and who reads it, is followed through the instructions of the program.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tracegrad._jax.compiled import COPIES
from tracegrad._jax.hlo import (
    Computation,
    Frame,
    Instruction,
    Message,
    Module,
    decoded,
    first,
    module_of,
    numbers,
)

Index = tuple[int, ...]  # of a part of a tuple
_Part = tuple[int, Index]  # the key of an instruction, and of what it is the part

# The same buffer under another name.
_RENAMES = ("bitcast", "opt-barrier", "copy-done", "async-done")
# Runs a computation that has buffers of its own; and one that has none.
_RUNS = ("while", "call", "conditional")
_RUNS_AS_ONE = ("fusion", "async-start")
# A loop stacks what its body computes: that is the body's line, and not the loop's.
_STACKS = re.compile(r"while/body/(jit\(\w+\)/)?dynamic_update_slice$")
_UNSTACKS = re.compile(r"while/body/(jit\(\w+\)/)?dynamic_slice$")
_NAMES = {"dot": "dot_general", "convolution": "conv_general_dilated"}  # as JAX has them
_HOST = 5  # the number of the host's memory


class Operation(NamedTuple):
    """What an instruction computes, as it was traced.

    Attributes:
      name: what it does, ``dot_general``; of an argument ``""``.
      path: the named scopes and transformations around it, ``jit(f)/jvp(block)``; of an argument
        its name.
      frames: the Python frames that traced it, innermost first.
      is_backward: whether it is of a backward pass.
    """

    name: str
    path: str
    frames: tuple[Frame, ...]
    is_backward: bool


class Buffer(NamedTuple):
    """Of what is in use at the peak.

    Attributes:
      size: bytes.
      kind: ``argument``, ``result`` or ``temporary``.
      type: of what is in it, ``f32[64,512]``.
      made: what has computed that, where it is known.
      reader: the operation at the peak or after it that reads it next; of what the forward pass
        makes rather one of the backward pass.
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
    """What is in use at the peak, the operation that is there, and bytes over the program."""

    at: Operation | None
    buffers: list[Buffer]
    timeline: tuple[int, ...]


def account_of_buffers(compiled: Any) -> Account | None:
    """The account of a `jax.stages.Compiled`; None where the backend does not tell its buffers."""
    analysis = compiled.memory_analysis()
    message = getattr(analysis, "serialized_buffer_assignment_proto", b"")
    return _Reader(module_of(compiled), decoded(message)).account() if message else None


class _Value(NamedTuple):
    """One of the values that share an allocation: what computes it, in which place of which
    allocation it is (number, offset and size), and from which instruction to which."""

    each: Instruction
    part: Index
    slot: tuple[int, int, int]
    first: int
    last: int


class _Read(NamedTuple):
    """What reads a value, as which operand (None: it is what a computation returns), until when."""

    reader: Instruction
    operand: int | None
    until: int


class _Reader:
    """The buffers of a program, and the ways of what is in them."""

    def __init__(self, module: Module, assignment: Message):
        self.module = module
        self.home: dict[int, Computation] = {}
        self.caller: dict[int, Instruction] = {}  # of a computation
        self.users: dict[int, list[tuple[Instruction, int]]] = {}  # and as which operand
        for computation in module.computations.values():
            for each in computation.instructions.values():
                self.home[each.key] = computation
                for k, operand in enumerate(each.operands):
                    self.users.setdefault(operand, []).append((each, k))
                if each.op in _RUNS_AS_ONE or each.op in _RUNS:
                    self.caller.update(dict.fromkeys(each.called, each))
        # When an instruction runs, and when what it runs is over.
        self.order: dict[int, int] = {}
        self.over: dict[int, int] = {}
        self._number(module.entry)
        self.allocations = [_allocation(decoded(a)) for a in assignment.get(3, ())]
        self._places: dict[int, _Part] = {}  # of each value
        for message in map(decoded, assignment.get(1, ())):
            place = decoded(first(message, 3, b""))
            self._places[first(message, 1)] = first(place, 4), tuple(numbers(place, 3))
        self._parts = set(self._places.values())

    def _number(self, computation: Computation) -> None:
        for key, each in computation.instructions.items():
            self.order[key] = len(self.order)
            for called in each.called if each.op in _RUNS else ():
                self._number(self.module.computations[called])
            self.over[key] = len(self.order) - 1

    def account(self) -> Account:
        values = {allocation: self._values(allocation) for allocation in self.allocations}
        temporary = [v for a in values if a.kind == "temporary" for v in values[a]]
        # An argument is there at first, and a result at last.
        ends = {"argument": 0, "result": -1}
        lasting = {a: v[ends[a.kind]] for a, v in values.items() if v and a.kind in ends}
        always = sum(value.slot[2] for value in lasting.values())
        timeline = _timeline(always, temporary, len(self.order))
        moment = max(range(len(timeline)), key=timeline.__getitem__)
        slots = {v.slot: v for v in temporary if v.first <= moment <= v.last}
        buffers = [self._buffer(v, moment, "temporary") for v in slots.values()]
        buffers += [self._buffer(v, moment, a.kind) for a, v in lasting.items()]
        return Account(self._at(moment), buffers, timeline)

    def _at(self, moment: int) -> Operation | None:
        """The operation that runs at a moment, or has run before it."""
        ran = [key for key, order in self.order.items() if order <= moment]
        found = (self._operation(self._maker(self._instruction(key))) for key in reversed(ran))
        return next((each for each in found if each is not None and each.frames), None)

    def _instruction(self, key: int) -> Instruction:
        return self.home[key].instructions[key]

    def _values(self, allocation: _Allocation) -> list[_Value]:
        """What is assigned to an allocation, in the order in which it is computed."""
        found = []
        for number, offset, size in allocation.assigned:
            key, index = self._places.get(number, (0, ()))
            if key not in self.order or self._instruction(key).type.at(index).kind == "tuple":
                continue  # of a part that is never run; or of nothing but addresses
            each, slot = self._instruction(key), (allocation.number, offset, size)
            # The result of a loop is there when that is over.
            found.append(_Value(each, index, slot, self.over[key], self._last(each, index)))
        return sorted(found, key=lambda value: value.first)

    def _buffer(self, value: _Value, moment: int, kind: str) -> Buffer:
        each, index = value.each, value.part
        reads = sorted(self._readers(each, index, set()), key=lambda r: self.order[r.reader.key])
        told = [(self.order[read.reader.key], self._reading(read)) for read in reads]
        known = [(order, reader) for order, reader in told if reader is not None]
        later = [reader for order, reader in known if order >= moment]
        readers = later or [reader for _, reader in known]  # in the next turn of a loop
        back = [reader for reader in readers if reader.is_backward]
        made = self._operation(self._content(each, index))
        if made is None or (made.name and not made.path):  # XLA's own: for what reads it
            made = next((r for r in readers if r.path), made) or Operation(each.op, "", (), False)
        readers = readers if made.is_backward else back or readers
        end = len(self.order)
        return Buffer(
            size=value.slot[2],
            kind=kind,
            type=str(each.type.at(index)),
            made=made,
            reader=next(iter(readers), None),
            is_read_back=bool(back),
            alive=(
                0.0 if kind == "argument" else value.first / end,
                (value.last + 1) / end if kind == "temporary" else 1.0,
            ),
        )

    # ------------------------------------------------------------------------------ what is in it

    def _content(self, each: Instruction, index: Index) -> Instruction | None:
        """What computes what will be in a buffer: if a loop fills it, that."""
        for user, k in self.users.get(each.key, ()):
            for loop, _ in self.users.get(user.key, ()) if user.op == "tuple" else ():
                if loop.op == "while":
                    return self._maker(loop, (k, *index))
        return self._maker(each, index)

    def _maker(
        self, each: Instruction, index: Index = (), seen: set[_Part] | None = None
    ) -> Instruction | None:
        """The instruction that computes a part of what another one is; None if it is itself."""
        seen = set() if seen is None else seen
        while (each.key, index) not in seen:
            seen.add((each.key, index))
            here = self.home[each.key].instructions
            if each.op == "tuple" and index:
                each, index = here[each.operands[index[0]]], index[1:]
            elif each.op == "get-tuple-element":
                each, index = here[each.operands[0]], (each.number, *index)
            elif each.op == "async-start" and index[:1] == (0,):  # what it was given
                each, index = here[each.operands[index[1]]], index[2:]
            elif each.op == "async-start":
                each, index = self._root(each.called[0]), index[1:]
            elif each.op in _RENAMES:
                each, index = here[each.operands[0]], self._inside(each, index)
            elif each.op == "copy-start":
                each, index = here[each.operands[0]], index[1:]
            elif each.op == "copy" or (each.op in COPIES and not each.scopes):
                each = here[each.operands[0]]
            elif each.op == "dynamic-update-slice" and any(map(_STACKS.search, each.scopes)):
                each = here[each.operands[1]]
            elif each.op == "conditional":
                found = (self._maker(self._root(key), index, seen) for key in each.called)
                known = [maker for maker in found if maker is not None]
                return next((maker for maker in known if maker.frame), next(iter(known), None))
            elif each.op in ("fusion", "call"):
                each = self._root(each.called[0])
            elif each.op == "while":
                written = self._maker(self._body(each).root, index, seen)
                if written is not None:
                    return written
                each = here[each.operands[0]]
            elif each.op == "parameter" and (caller := self._caller(each)) is not None:
                if caller.op == "while":
                    written = self._maker(self._body(caller).root, index, seen)
                    if written is not None:
                        return written
                each = self._given(caller, each)
            else:
                return each
        return None

    def _inside(self, renames: Instruction, index: Index) -> Index:
        """Where what is renamed is in the operand: of what runs aside in its second part."""
        return (1, *index) if renames.op == "async-done" else index

    def _given(self, caller: Instruction, parameter: Instruction) -> Instruction:
        """What a computation is run on."""
        number = parameter.number
        if caller.op == "while":
            number = 0
        elif caller.op == "conditional":  # what is asked stands first, then one for each branch
            number = 1 + caller.called.index(self.home[parameter.key].key)
        return self._instruction(caller.operands[number])

    def _root(self, computation: int) -> Instruction:
        return self.module.computations[computation].root

    def _body(self, loop: Instruction) -> Computation:
        called = [self.module.computations[key] for key in loop.called]
        return next(each for each in called if each.root.type == loop.type)

    def _carried(self, loop: Instruction) -> Instruction:
        inside = self._body(loop).instructions.values()
        return next(each for each in inside if each.op == "parameter")

    def _caller(self, parameter: Instruction) -> Instruction | None:
        return self.caller.get(self.home[parameter.key].key)

    # ------------------------------------------------------------------------------- who reads it

    def _last(self, each: Instruction, index: Index) -> int:
        """When a value is read last."""
        reads = self._readers(each, index, set(), is_value=True)
        return max((read.until for read in reads), default=self.over[each.key])

    def _readers(
        self, each: Instruction, index: Index, seen: set[_Part], *, is_value: bool = False
    ) -> Iterator[_Read]:
        """What reads a part of what an instruction is.

        `is_value`: what a loop makes of it is another one.
        """
        if (each.key, index) in seen:
            return
        seen.add((each.key, index))
        ways: list[tuple[Instruction, Index]] = []  # on which it has another name
        for user, k in self.users.get(each.key, ()):
            if user.op == "tuple":
                ways.append((user, (k, *index)))
            elif user.op == "get-tuple-element":
                is_of_it = not index or index[0] == user.number
                ways += [(user, index[1:])] if is_of_it else []
            elif user.op in _RENAMES:
                inside = self._inside(user, ())
                ways += [(user, index[len(inside) :])] if index[: len(inside)] == inside else []
            elif user.op == "while":
                carried = self._carried(user)
                is_other = is_value and (carried.key, index) in self._parts
                yield _Read(user, k, (self.order if is_other else self.over)[user.key])
                ways += [] if is_other else [(carried, index), (user, index)]
            else:
                done = [after for after, _ in self.users.get(user.key, ())]
                waits = done if user.op.endswith("-start") else [user]
                yield _Read(user, k, max((self.over.get(v.key, 0) for v in waits), default=0))
        home = self.home[each.key]
        caller = self.caller.get(home.key)
        if each.key == home.root.key and caller is not None:  # what it returns
            if caller.op == "call" or (caller.op in _RUNS and not is_value):
                ways.append((caller, index))
            if caller.op in _RUNS:
                yield _Read(each, None, self.order[each.key])
        for other, part in ways:
            yield from self._readers(other, part, seen, is_value=is_value)

    def _reading(self, read: _Read) -> Operation | None:
        """The operation that reads: of several that run as one, the first that takes it, unless
        they end in the backward pass and that is of the forward pass; of a loop that takes it apart
        and of what XLA has put in, the one that reads that."""
        reader, operand, _ = read
        if operand is None or reader.op == "while" or any(map(_STACKS.search, reader.scopes)):
            return None
        runs_as_one = reader.op in _RUNS_AS_ONE
        last = reader if reader.scopes and not runs_as_one else self._maker(reader)
        whole = self._operation(last)
        takes = None
        if last is None or not last.scopes or any(map(_UNSTACKS.search, last.scopes)):
            takes = self._first_reading(reader)
        elif runs_as_one:
            inside = self.module.computations[reader.called[0]].instructions.values()
            parameter = next(v for v in inside if v.op == "parameter" and v.number == operand)
            takes = self._first_reading(parameter)
        is_later = whole is not None and whole.is_backward
        return whole if takes is None or (is_later and not takes.is_backward) else takes

    def _first_reading(self, each: Instruction) -> Operation | None:
        reads = map(self._reading, self._readers(each, (), set()))
        return next((read for read in reads if read is not None and read.path), None)

    def _operation(self, each: Instruction | None) -> Operation | None:
        if each is None:
            return None
        if each.op == "parameter":
            return Operation("", "".join(each.scopes), (), False)
        path, _, name = (each.scopes[-1] if each.scopes else each.op).rpartition("/")
        if "(" in name or each.op in _NAMES:  # a transformation; of a product maybe a transpose
            name = _NAMES.get(each.op, each.op)
        is_backward = any("transpose(" in scope for scope in each.scopes)
        return Operation(name, path, tuple(self.module.frames(each.frame)), is_backward)


class _Allocation(NamedTuple):
    number: int
    kind: str
    assigned: tuple[tuple[int, int, int], ...]  # the number of a value, its offset, its size


def _allocation(message: Message) -> _Allocation:
    kind = "temporary"
    if first(message, 5):
        kind = "argument"
    elif first(message, 12) or first(message, 3) or first(message, 8) == _HOST:
        kind = "constant"
    elif first(message, 7):
        kind = "result"
    assigned = map(decoded, message.get(9, ()))
    values = tuple((first(a, 1), first(a, 2), first(a, 3)) for a in assigned)
    return _Allocation(first(message, 1), kind, values)


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
