"""Finds which operation computes a value of a compiled program, and which operations read it.

A value is the result of an instruction, or a part of a tuple that an instruction returns. Tuples,
loops, branches and calls give the value other names, and the operation that computes it may be in
the middle of a fusion.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from tracegrad.planning.compiled import COPIES
from tracegrad.planning.hlo import Computation, HloFrame, Instruction, Module

Index = tuple[int, ...]  # the position of a part in nested tuples; () for all of the result
Part = tuple[int, Index]  # the key of an instruction, and the index of a part of its result

# Their result is their operand under another name.
_RENAMES = ("bitcast", "opt-barrier", "copy-done", "async-done")
# In a computation that these run, instructions have buffers; in a fusion, only the result has one.
_RUNS = ("while", "call", "conditional")
_RUNS_AS_ONE = ("fusion", "async-start")
# A scan writes each iteration's result into the stacked array, and reads its slice from another.
# The stacked value belongs to the line in the body that computes it, not to the line of the scan.
_STACKS = re.compile(r"while/body/(jit\(\w+\)/)?dynamic_update_slice$")
_UNSTACKS = re.compile(r"while/body/(jit\(\w+\)/)?dynamic_slice$")
_IN_PLACE = ("dynamic-update-slice", "scatter")
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
    """One read of a value.

    Attributes:
      reader: the instruction that reads the value.
      operand: the position of the operand that holds the value; None if `reader` computes the
        value itself, and the value is only returned.
      part: the index of the value in the operand.
      until: the number of the instruction at which the read is over.
    """

    reader: Instruction
    operand: int | None
    part: Index
    until: int


class Value(NamedTuple):
    """A value, its place in a buffer, and the instructions between which it is in use.

    Attributes:
      each: the instruction that computes the value.
      part: the index of the value in the instruction's result.
      slot: the number of its buffer, its offset in the buffer, and its size.
      first, last: the numbers of the first and the last instruction that it is in use at.
    """

    each: Instruction
    part: Index
    slot: tuple[int, int, int]
    first: int
    last: int

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.slot[2]


# The values of each buffer, in the order of their computation, by the kind of the buffer:
# ``argument``, ``result`` or ``temporary``.
Buffers = dict[str, list[list[Value]]]


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
        self._users: dict[int, list[tuple[Instruction, int]]] = {}  # with the operand's position
        self._first_reads: dict[int, Operation | None] = {}
        for computation in module.computations.values():
            for each in computation.instructions.values():
                self._home[each.key] = computation
                for k, operand in enumerate(each.operands):
                    self._users.setdefault(operand, []).append((each, k))
                if each.op in _RUNS_AS_ONE or each.op in _RUNS:
                    self._caller.update(dict.fromkeys(each.called, each))
        self.order: dict[int, int] = {}
        self.over: dict[int, int] = {}
        self._number(module.entry)

    def _number(self, computation: Computation) -> None:
        for key, each in computation.instructions.items():
            self.order[key] = len(self.order)
            for called in each.called if each.op in _RUNS else ():
                self._number(self._module.computations[called])
            self.over[key] = len(self.order) - 1

    def instruction(self, key: int) -> Instruction:
        """Returns the instruction with a key."""
        return self._home[key].instructions[key]

    def operand(self, each: Instruction, k: int) -> Instruction:
        """Returns the instruction that computes an operand."""
        return self.instruction(each.operands[k])

    def called(self, each: Instruction) -> list[Computation]:
        """Returns the computations that an instruction runs."""
        return [self._module.computations[key] for key in each.called]

    def is_carried(self, parameter: Instruction) -> bool:
        """Whether a parameter is the carry of a loop."""
        caller = self.caller_of(parameter)
        return caller is not None and caller.op == "while"

    def named(self, each: Instruction, index: Index) -> Part:
        """Returns the original name of a value: a part of the instruction that computes it, or of
        the carry of a loop."""
        while True:
            if each.op == "tuple" and index:
                each, index = self.operand(each, index[0]), index[1:]
            elif each.op == "get-tuple-element":
                each, index = self.operand(each, 0), (each.number, *index)
            elif each.op == "async-start" and index[:1] == (0,):
                each, index = self.operand(each, index[1]), index[2:]
            elif each.op == "copy-done":
                each, index = self.operand(each, 0), (0,)
            elif each.op == "copy-start" and index == (1,):
                each, index = self.operand(each, 0), ()
            elif each.op in _RENAMES:
                each, index = self.operand(each, 0), (*self._inside(each), *index)
            elif each.op == "call":
                each = self.called(each)[0].root
            elif each.op == "parameter" and not self.is_carried(each):
                caller = self.caller_of(each)
                if caller is None or caller.op not in _RUNS:
                    return each.key, index
                each = self._given(caller, each)
            else:
                return each.key, index

    # --------------------------------------------------------------------- what computes a value

    def content(self, each: Instruction, index: Index) -> Operation | None:
        """Returns the operation that computes a value; for an empty array that a loop fills, the
        operation in the loop that fills it."""
        maker = self._maker(each, index)
        if maker is not None and maker.op in _FILLS:
            for read in self.readers(each, index):
                if read.reader.op == "while":
                    maker = self._maker(read.reader, read.part) or maker
                    break
        return self._operation(maker)

    def _maker(
        self, each: Instruction, index: Index = (), seen: set[Part] | None = None
    ) -> Instruction | None:
        """Returns the instruction that computes a part of an instruction's result, looking through
        copies, calls and loops; None for a value that a loop only passes from iteration to
        iteration."""
        seen = set() if seen is None else seen
        while (part := self.named(each, index)) not in seen:
            seen.add(part)
            each, index = self.instruction(part[0]), part[1]
            caller = self.caller_of(each) if each.op == "parameter" else None
            if each.op == "copy-start":
                each, index = self.operand(each, 0), index[1:]
            elif each.op == "copy" or (each.op in COPIES and not each.scopes):
                each = self.operand(each, 0)
            elif self._stacks(each):
                each = self.operand(each, 1)
            elif each.op == "conditional":
                found = (self._maker(branch.root, index, seen) for branch in self.called(each))
                known = [maker for maker in found if maker is not None]
                return next((maker for maker in known if maker.frame), next(iter(known), None))
            elif each.op == "async-start":
                each, index = self.called(each)[0].root, index[1:]
            elif each.op == "fusion":
                each = self.called(each)[0].root
            elif each.op == "while" or (caller is not None and caller.op == "while"):
                # The body computes the carry; if the body only passes it on, the loop's operand.
                loop = each if caller is None else caller
                root = self.body(loop).root
                if (root.key, index) in seen:  # the search is in this body already
                    return None
                seen.add((root.key, index))
                if (made := self._maker(root, index, seen)) is not None:
                    return made
                each = self.operand(loop, 0)
            elif caller is not None:
                each = self._given(caller, each)
            else:
                return each
        return None

    def _stacks(self, each: Instruction) -> bool:
        return each.op == "dynamic-update-slice" and any(map(_STACKS.search, each.scopes))

    def _inside(self, renames: Instruction) -> Index:
        """The index of the renamed value in the operand: an asynchronous operation returns a tuple
        with the result as its second part."""
        return (1,) if renames.op == "async-done" else ()

    def body(self, loop: Instruction) -> Computation:
        """Returns the body of a loop: its condition has another type."""
        return next(each for each in self.called(loop) if each.root.type == loop.type)

    def _parameter(self, computation: Computation, number: int) -> Instruction:
        inside = computation.instructions.values()
        return next(v for v in inside if v.op == "parameter" and v.number == number)

    def caller_of(self, parameter: Instruction) -> Instruction | None:
        """Returns the instruction that runs the computation of a parameter; None for the entry
        computation."""
        return self._caller.get(self._home[parameter.key].key)

    def _given(self, caller: Instruction, parameter: Instruction) -> Instruction:
        """Returns the instruction whose result the caller passes as a parameter."""
        number = parameter.number
        if caller.op == "while":
            number = 0
        elif caller.op == "conditional":  # the predicate, then one operand for each branch
            number = 1 + caller.called.index(self._home[parameter.key].key)
        return self.instruction(caller.operands[number])

    # ----------------------------------------------------------------------- what reads a value

    def last_read(self, each: Instruction, index: Index, values: Collection[Part]) -> int:
        """Returns the number of the instruction at which the last read of a value is over; for
        `values` see `readers`."""
        reads = self.readers(each, index, values)
        return max((read.until for read in reads), default=self.over[each.key])

    def readers(
        self, each: Instruction, index: Index, values: Collection[Part] | None = None
    ) -> Iterator[Read]:
        """Yields the reads of a value, under all its names.

        `values`: if a loop's carry is one of these values, the reads in the loop count as reads of
        the carry, and are not yielded.
        """
        seen: set[Part] = set()
        ways = [(each, index)]
        while ways:
            here, part = ways.pop()
            if (here.key, part) in seen:
                continue
            seen.add((here.key, part))
            for user, k in self._users.get(here.key, ()):
                found, names = self._used(user, k, part, values)
                ways += names
                if found is not None:
                    yield found
            home = self._home[here.key]
            caller = self._caller.get(home.key)
            if here.key == home.root.key and caller is not None and caller.op in _RUNS:
                yield Read(here, None, part, self.order[here.key])
                if caller.op == "call" or values is None:
                    ways.append((caller, part))

    def _used(
        self, user: Instruction, k: int, part: Index, values: Collection[Part] | None
    ) -> tuple[Read | None, list[tuple[Instruction, Index]]]:
        """Returns how an instruction reads a part of its operand, if it does, and the further names
        that the instruction gives to this part."""
        if user.op == "tuple":
            return None, [(user, (k, *part))]
        if user.op == "get-tuple-element":
            return None, [(user, part[1:])] if not part or part[0] == user.number else []
        if user.op in _RENAMES:
            inside = self._inside(user)
            is_of_it = part[: len(inside)] == inside
            return None, [(user, part[len(inside) :])] if is_of_it else []
        if user.op == "call":
            return None, [(self._parameter(self.called(user)[0], k), part)]
        if user.op == "while":
            carried = self._parameter(self.body(user), 0)
            is_other = values is not None and (carried.key, part) in values
            until = (self.order if is_other else self.over)[user.key]
            names = [] if is_other else [(carried, part), (user, part)]
            return Read(user, k, part, until), names
        done = [after for after, _ in self._users.get(user.key, ())]
        waits = done if user.op.endswith("-start") else [user]
        until = max((self.over.get(each.key, 0) for each in waits), default=0)
        names = [(user, ())] if values is None and self._is_stacked_on(user, k) else []
        return Read(user, k, part, until), names

    def updated(self, each: Instruction, index: Index = ()) -> tuple[Instruction, int] | None:
        """Returns the instruction that updates an operand in place (`each`, or one inside of it),
        and the position of this operand in `each`; None if no operand is updated in place."""
        if each.op in _IN_PLACE:
            return each, 0
        if each.op not in _RUNS_AS_ONE:
            return None
        body = self.called(each)[0]
        key, index = self.named(body.root, index[1:] if each.op == "async-start" else index)
        found = self.updated(self.instruction(key), index)
        if found is None:
            return None
        key, _ = self.named(self.operand(self.instruction(key), found[1]), ())
        given = self.instruction(key)
        return (found[0], given.number) if given.op == "parameter" else None

    def _is_stacked_on(self, user: Instruction, k: int) -> bool:
        """Whether the result is operand `k` with the results of one more iteration written in."""
        found = self.updated(user) if user.op != "async-start" else None
        return found is not None and found[1] == k and self._stacks(found[0])

    def reading(self, read: Read) -> Operation | None:
        """Returns the operation that performs a read; None for a reader that only passes it on.

        In a fusion, this is the first operation that reads the value; but if only the fusion's
        result belongs to the backward pass, the operation of the result. If a loop takes a slice,
        or XLA has inserted the reader, it is the operation that reads their result.
        """
        reader, operand = read.reader, read.operand
        if operand is None or reader.op == "while" or self._is_stacked_on(reader, operand):
            return None
        runs_as_one = reader.op in _RUNS_AS_ONE
        last = reader if reader.scopes and not runs_as_one else self._maker(reader)
        ends = [] if last is None else [last]
        if last is not None and last.op == "tuple":
            ends = [self.operand(last, k) for k in range(len(last.operands))]
        wholes = [self._operation(self._maker(each)) for each in ends]
        told = [each for each in wholes if each is not None and each.path]
        whole = next((each for each in told if each.is_backward), next(iter(told), None))
        if whole is None or (last is not None and any(map(_UNSTACKS.search, last.scopes))):
            takes = self._first_reading(reader)
        elif runs_as_one:
            takes = self._first_reading(self._parameter(self.called(reader)[0], operand))
        else:
            takes = None
        is_later = whole is not None and whole.is_backward
        return whole if takes is None or (is_later and not takes.is_backward) else takes

    def _first_reading(self, each: Instruction) -> Operation | None:
        if each.key not in self._first_reads:
            self._first_reads[each.key] = None  # ends the search if it comes back here
            reads = map(self.reading, self.readers(each, ()))
            found = next((read for read in reads if read is not None and read.path), None)
            self._first_reads[each.key] = found
        return self._first_reads[each.key]

    def operation(self, key: int) -> Operation | None:
        """Returns the operation that an instruction computes; for a fusion, the last one in it."""
        return self._operation(self._maker(self.instruction(key)))

    def _operation(self, each: Instruction | None) -> Operation | None:
        if each is None:
            return None
        if each.op == "parameter":
            return Operation("", "".join(each.scopes), (), False)
        path, _, name = (each.scopes[-1] if each.scopes else each.op).rpartition("/")
        if "(" in name or each.op in _NAMES:  # a transformation, or a product's transpose
            name = _NAMES.get(each.op, each.op)
        is_backward = any("transpose(" in scope for scope in each.scopes)
        return Operation(name, path, tuple(self._module.frames(each.frame)), is_backward)
