"""Finds which operation computes a value of a compiled program, and which operations read it.

A value is an array: the result of an instruction, or a part of a tuple that it returns. Two
relations connect such parts. A part may be the same as another part: tuples, bitcasts and calls
only pass values on. A part may be a join of several parts: the carry of a loop, the result of a
branch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from tracegrad.planning.compiled import COPIES
from tracegrad.planning.hlo import Computation, HloFrame, Instruction, Module, Type

Index = tuple[int, ...]  # the position of an array in nested tuples; () for a result without tuples
Part = tuple[int, Index]  # the key of an instruction, and the index of an array of its result

# In a computation that these run, instructions have buffers; in a fusion, only the result has one.
_RUNS = ("while", "call", "conditional")
_RUNS_AS_ONE = ("fusion", "async-start")
# These only pass their operands on; some await what runs aside.
_AWAITS = ("copy-done", "async-done")
_PASSES = ("tuple", "get-tuple-element", "bitcast", "opt-barrier", "call", *_AWAITS)
# A scan writes each iteration's result into the stacked array, and reads its slice from another.
# The stacked value belongs to the line in the body that computes it, not to the line of the scan.
_STACKS = re.compile(r"while/body/(jit\(\w+\)/)?dynamic_update_slice$")
_UNSTACKS = re.compile(r"while/body/(jit\(\w+\)/)?dynamic_slice$")
_FILLS = ("broadcast", "constant")  # they make the empty array that a loop fills
_NAMES = {"dot": "dot_general", "convolution": "conv_general_dilated"}  # the names in JAX


class Operation(NamedTuple):
    """The traced operation that an instruction computes.

    Attributes:
      name: the name of the primitive, ``dot_general``; ``""`` for an argument.
      path: the named scopes and transformations around it, ``jit(f)/jvp(block)``; for an argument,
        its name; ``""`` for an instruction that XLA has inserted.
      frames: the Python frames that traced it, innermost first.
      is_backward: whether it belongs to a backward pass.
    """

    name: str
    path: str
    frames: tuple[HloFrame, ...]
    is_backward: bool


class Read(NamedTuple):
    """One read of a value: the instruction that reads it, and the position of the operand."""

    reader: Instruction
    operand: int


class ValueFlow:
    """The flow of values through a program: who computes them, and who reads them.

    Attributes:
      order: the number of each instruction that runs by itself (not inside of a fusion), in the
        order of execution.
      over: the number of the last instruction that runs as a part of it, or its own.
    """

    def __init__(self, module: Module):
        self._module = module
        self._home: dict[int, Computation] = {}
        self._caller: dict[int, Instruction] = {}  # by the key of a computation
        self._users: dict[int, list[Read]] = defaultdict(list)
        self._same: dict[Part, Part] = {}
        self._joins: dict[Part, list[Part]] = {}
        self._first_reads: dict[int, Operation | None] = {}
        for computation in module.computations.values():
            for each in computation.instructions.values():
                self._home[each.key] = computation
                for k, operand in enumerate(each.operands):
                    self._users[operand].append(Read(each, k))
                if each.op in _RUNS_AS_ONE or each.op in _RUNS:
                    self._caller.update(dict.fromkeys(each.called, each))
        # A computation comes before its callers: so its own parameters are not connected yet.
        for computation in module.computations.values():
            for each in computation.instructions.values():
                self._connect(each)
        self._names: dict[Part, list[Part]] = defaultdict(list)  # all parts that are the same
        for part in self._same:
            self._names[self.origin(part)].append(part)
        self._joined: dict[Part, list[Part]] = defaultdict(list)  # the joins that a part enters
        for join, parts in self._joins.items():
            for part in parts:
                self._joined[self.origin(part)].append(join)
        self.order: dict[int, int] = {}
        self.over: dict[int, int] = {}
        self._number(module.entry)

    def _number(self, computation: Computation) -> None:
        for key, each in computation.instructions.items():
            self.order[key] = len(self.order)
            for called in self.called(each) if each.op in _RUNS else ():
                self._number(called)
            self.over[key] = len(self.order) - 1

    def _connect(self, each: Instruction) -> None:
        """Connects the parts of a result, and the parameters of the computations that it runs."""
        for index in _indices(each.type):
            if (same := self._passed_on(each, index)) is not None:
                self._same[each.key, index] = same
        called = self.called(each)
        if each.op == "while":
            self._connect_loop(each)
        elif each.op == "conditional":
            for index in _indices(each.type):
                self._joins[each.key, index] = [(branch.root.key, index) for branch in called]
            for branch, operand in zip(called, each.operands[1:], strict=True):
                self._pass_on(operand, _parameter(branch, 0))
        elif each.op == "call":
            for k, operand in enumerate(each.operands):
                self._pass_on(operand, _parameter(called[0], k))

    def _connect_loop(self, loop: Instruction) -> None:
        """Connects the carry of a loop: its result, and the parameters of condition and body."""
        (body,) = [each for each in self.called(loop) if each.root.type == loop.type]
        carry = [loop.key, *(_parameter(each, 0).key for each in self.called(loop))]
        for index in _indices(loop.type):
            first, next_ = (loop.operands[0], index), (body.root.key, index)
            parts = [(key, index) for key in carry]
            if self.origin(next_) in parts:  # the body only passes it on
                self._same.update((part, first) for part in parts)
            else:
                self._joins.update((part, [next_, first]) for part in parts)

    def _pass_on(self, operand: int, parameter: Instruction) -> None:
        for index in _indices(parameter.type):
            self._same[parameter.key, index] = operand, index

    def _passed_on(self, each: Instruction, index: Index) -> Part | None:
        """Returns the part that a part of a result is the same as; None for another value."""
        match each.op:
            case "tuple":
                return each.operands[index[0]], index[1:]
            case "get-tuple-element":
                return each.operands[0], (each.number, *index)
            case "bitcast" | "opt-barrier":
                return each.operands[0], index
            case "call":
                return self.called(each)[0].root.key, index
            case "copy-start" if index == (1,):
                return each.operands[0], ()
            case "copy-done":
                return each.operands[0], (0,)
            case "async-start" if index[0] == 0:
                return each.operands[index[1]], index[2:]
            case "async-done":
                return each.operands[0], (1, *index)
        return None

    def instruction(self, key: int) -> Instruction:
        return self._home[key].instructions[key]

    def called(self, each: Instruction) -> list[Computation]:
        return [self._module.computations[key] for key in each.called]

    def origin(self, part: Part) -> Part:
        """Returns the part that first holds a value."""
        while part in self._same:
            part = self._same[part]
        return part

    # --------------------------------------------------------------------- what computes a value

    def content(self, part: Part) -> Operation | None:
        """Returns the operation that computes a value; for an empty array that a loop fills, the
        operation in the loop that fills it."""
        maker = self._maker(part)
        if maker is not None and maker.op in _FILLS:
            for join in self._joined[self.origin(part)][:1]:
                maker = self._maker(join) or maker
        return None if maker is None else self._operation(maker)

    def results(self, each: Instruction) -> list[Operation]:
        """Returns the operations that compute an instruction's results; for a fusion, the last ones
        in it."""
        makers = (self._maker((each.key, index)) for index in _indices(each.type))
        return [self._operation(maker) for maker in makers if maker is not None]

    def _maker(self, part: Part) -> Instruction | None:
        """Returns the instruction that computes a value, preferably one with a line."""
        makers = list(self._makers(part, set()))
        return next((each for each in makers if each.frame), next(iter(makers), None))

    def _makers(self, part: Part, seen: set[Part]) -> Iterator[Instruction]:
        """Yields the instructions that may compute a value, looking through copies and joins."""
        key, index = part = self.origin(part)
        if part in seen:
            return
        seen.add(part)
        each = self.instruction(key)
        caller = self._caller.get(self._home[key].key)
        if part in self._joins:
            sources = self._joins[part]
        elif each.op == "copy-start":
            sources = [(each.operands[0], ())]
        elif each.op == "copy" or (each.op in COPIES and not each.scopes):
            sources = [(each.operands[0], index)]
        elif _stacks(each):
            sources = [(each.operands[1], ())]
        elif each.op in _RUNS_AS_ONE:
            inside = index[1:] if each.op == "async-start" else index
            sources = [(self.called(each)[0].root.key, inside)]
        elif each.op == "parameter" and caller is not None:
            sources = [(caller.operands[each.number], index)]
        else:
            yield each
            return
        for source in sources:
            yield from self._makers(source, seen)

    def _operation(self, each: Instruction) -> Operation:
        if each.op == "parameter":
            return Operation("", "".join(each.scopes), (), False)
        path, _, name = (each.scopes[-1] if each.scopes else each.op).rpartition("/")
        if "(" in name or each.op in _NAMES:  # a transformation, or a product's transpose
            name = _NAMES.get(each.op, each.op)
        is_backward = any("transpose(" in scope for scope in each.scopes)
        return Operation(name, path, tuple(self._module.frames(each.frame)), is_backward)

    # ----------------------------------------------------------------------- what reads a value

    def last_read(self, part: Part) -> int:
        """Returns the number of the instruction at which the last read of a value is over."""
        until = self.over[part[0]]
        for key, index in [part, *self._names[part]]:
            for reader, _ in self._users[key]:
                if reader.op == "while" and (reader.key, index) in self._joins:
                    until = max(until, self.order[reader.key])  # the loop's carry takes its place
                elif reader.op not in _PASSES:
                    done = self._users[reader.key] if reader.op.endswith("-start") else []
                    ends = [reader.key, *(after.reader.key for after in done)]
                    until = max(until, *(self.over.get(end, 0) for end in ends))
            home = self._home[key]
            if key == home.root.key and home.key in self._caller:
                until = max(until, self.order[key])
        return until

    def reads(self, *parts: Part) -> Iterator[Read]:
        """Yields the reads of values, also by the joins that they enter, and by arrays in which a
        loop stacks them."""
        ways, seen = list(map(self.origin, parts)), set()
        while ways:
            part = self.origin(ways.pop(0))
            if part in seen:
                continue
            seen.add(part)
            ways += self._joined[part]
            for key, _ in [part, *self._names[part]]:
                for read in self._users[key]:
                    if self._is_stacked_on(read):
                        ways.append((read.reader.key, ()))
                    elif read.reader.op == "conditional":
                        if read.operand == 0:  # it chooses a branch; the others enter branches
                            yield read
                    elif read.reader.op not in (*_PASSES, "while"):
                        yield read

    def reading(self, read: Read) -> Operation | None:
        """Returns the operation that performs a read, if it is known.

        A fusion stands for its first operation that reads the value; but it stands for the
        operation of its result if only that belongs to the backward pass. A slice that a loop takes
        and an instruction that XLA has inserted stand for the operation that reads their result.
        """
        reader, operand = read
        results = [each for each in self.results(reader) if each.path]
        whole = next((each for each in results if each.is_backward), next(iter(results), None))
        if whole is None or any(_UNSTACKS.search(f"{e.path}/{e.name}") for e in results):
            first = self._first_reading(reader)
        elif reader.op in _RUNS_AS_ONE:
            first = self._first_reading(_parameter(self.called(reader)[0], operand))
        else:
            return whole
        is_later = whole is not None and whole.is_backward
        return whole if first is None or (is_later and not first.is_backward) else first

    def _first_reading(self, each: Instruction) -> Operation | None:
        if each.key not in self._first_reads:
            self._first_reads[each.key] = None  # ends the search if it comes back here
            reads = self.reads(*((each.key, index) for index in _indices(each.type)))
            told = map(self.reading, reads)
            found = next((read for read in told if read is not None and read.path), None)
            self._first_reads[each.key] = found
        return self._first_reads[each.key]

    def _is_stacked_on(self, read: Read) -> bool:
        """Whether the result is the operand with the results of one more iteration written in."""
        each, operand = read
        if each.op != "fusion":
            return operand == 0 and _stacks(each)
        last = self.instruction(self.origin((self.called(each)[0].root.key, ()))[0])
        if not _stacks(last):
            return False
        stacked = self.instruction(self.origin((last.operands[0], ()))[0])
        return stacked.op == "parameter" and stacked.number == operand


def _stacks(each: Instruction) -> bool:
    return each.op == "dynamic-update-slice" and any(map(_STACKS.search, each.scopes))


def _parameter(computation: Computation, number: int) -> Instruction:
    inside = computation.instructions.values()
    return next(v for v in inside if v.op == "parameter" and v.number == number)


def _indices(of: Type) -> list[Index]:
    """Returns the positions of the arrays in a type."""
    if of.kind != "tuple":
        return [()]
    return [(k, *index) for k, part in enumerate(of.parts) for index in _indices(part)]
