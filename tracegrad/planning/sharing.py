"""Which values of a program share a buffer, for backends where XLA does not say.

What has to share is known: what a loop carries, what branches return, what is updated in place. And
what is computed element by element goes where an operand of the same size is that nothing reads
any more, which is XLA's habit on all backends.
"""

from __future__ import annotations

from collections.abc import Iterator

from tracegrad.planning.flow import Buffers, Flow, Index, Part, Value
from tracegrad.planning.hlo import Instruction, Type

# Nothing is written for them, or what they run says what is.
_NO_VALUES = frozenset(
    """
    bitcast tuple get-tuple-element opt-barrier constant copy-done async-done after-all call
    partition-id replica-id
    """.split()  # noqa: SIM905
)
_BY_ELEMENT = frozenset(
    """
    abs add and atan2 cbrt ceil clamp compare complex convert cosine divide erf exponential
    exponential-minus-one floor fusion imag is-finite log log-plus-one logistic map maximum minimum
    multiply negate not or power real reduce-precision remainder round-nearest-afz
    round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine
    sqrt subtract tan tanh xor
    """.split()  # noqa: SIM905
)
_SAME_ELEMENTS = ("bitcast", "copy", "tuple")
# Of what begins to be computed aside, the part that is computed; the others are what it is given.
_OWN: dict[str, Index] = {"async-start": (1,), "copy-start": (0,)}


def shared(flow: Flow) -> Buffers:
    """The buffers of a program, as they are likely to be."""
    return _Sharing(flow).buffers()


class _Sharing:
    def __init__(self, flow: Flow):
        self._flow = flow
        self._sizes = {part: size for key in flow.order for part, size in self._written(key)}
        self._buffer: dict[Part, Part] = {}  # towards the name of the buffer of a value
        for part in self._sizes:
            for same in self._shares(*part):
                self._join(same, part)
        values = self._sizes.keys()
        self._ends = {
            (key, index): flow.last_read(flow.instruction(key), index, values)
            for key, index in self._sizes
        }
        last: dict[Part, int] = {}  # of all values of a buffer
        for part, end in self._ends.items():
            buffer = self._find(part)
            last[buffer] = max(last.get(buffer, 0), end)
        for part in self._sizes:
            self._reuse(part, last)

    def _written(self, key: int) -> Iterator[tuple[Part, int]]:
        """The parts of an instruction that are written to the device's memory, and their bytes."""
        each = self._flow.instruction(key)
        is_given = each.op == "parameter" and not self._flow.is_carried(each)
        if each.op in _NO_VALUES or (is_given and self._flow.caller_of(each) is not None):
            return
        for index, array in _arrays(each.type):
            is_view = each.op.endswith("-start") and index != _OWN.get(each.op, index)
            if array.nbytes and not array.memory and not is_view:
                yield (key, index), array.nbytes

    def _shares(self, key: int, index: Index) -> Iterator[Part]:
        """The other values that are in the same place as one."""
        flow, each = self._flow, self._flow.instruction(key)
        if each.op == "while":
            yield flow.named(flow.operand(each, 0), index)
            yield flow.named(flow.body(each).root, index)
            for parameter in flow.parameters(each):
                yield parameter.key, index
        elif each.op == "conditional":
            for branch in flow.called(each):
                yield flow.named(branch.root, index)
        elif (found := flow.updated(each, index)) is not None:
            yield flow.named(flow.operand(each, found[1]), ())

    def _reuse(self, part: Part, last: dict[Part, int]) -> None:
        """Puts what is computed element by element where an operand is that is read last."""
        flow, each = self._flow, self._flow.instruction(part[0])
        for k in range(len(each.operands)) if each.op in _BY_ELEMENT else ():
            operand = flow.named(flow.operand(each, k), ())
            mine, its = self._find(part), self._find(operand)
            is_there = flow.instruction(operand[0]).op not in ("parameter", "constant")
            is_alike = self._sizes.get(operand) == self._sizes[part] and its != mine
            is_over = is_there and is_alike and last[its] == flow.order[part[0]]
            if is_over and self._takes_elements(each, k):
                end = max(last[its], last[mine])
                self._join(operand, part)
                last[self._find(part)] = end
                return

    def _takes_elements(self, each: Instruction, k: int) -> bool:
        """Whether what an instruction makes of an operand is computed element by element."""
        if each.op != "fusion":
            return True
        body = self._flow.called(each)[0]
        of_it: set[int] = set()
        for inner in body.instructions.values():
            if inner.op == "parameter":
                of_it.update([inner.key] if inner.number == k else [])
            elif not of_it.isdisjoint(inner.operands):
                if inner.op not in _BY_ELEMENT and inner.op not in _SAME_ELEMENTS:
                    return False
                of_it.add(inner.key)
        return True

    def _find(self, part: Part) -> Part:
        while (nearer := self._buffer.get(part, part)) != part:
            part = nearer
        return part

    def _join(self, one: Part, other: Part) -> None:
        if (of_one := self._find(one)) != (of_other := self._find(other)):
            self._buffer[of_one] = of_other

    def buffers(self) -> Buffers:
        """See `shared`."""
        found: dict[Part, list[Part]] = {}
        for part in self._sizes:
            found.setdefault(self._find(part), []).append(part)
        root, entry = self._flow.root, self._flow.arguments
        kinds = {self._find(self._flow.named(root, i)): "result" for i, _ in _arrays(root.type)}
        kinds |= {self._find((v.key, i)): "argument" for v in entry for i, _ in _arrays(v.type)}
        by_kind: Buffers = {"argument": [], "result": [], "temporary": []}
        for number, (buffer, parts) in enumerate(found.items()):
            size = max(self._sizes[part] for part in parts)
            values = [self._value(part, (number, 0, size)) for part in parts]
            values.sort(key=lambda value: value.first)
            by_kind[kinds.get(buffer, "temporary")].append(values)
        return by_kind

    def _value(self, part: Part, slot: tuple[int, int, int]) -> Value:
        each, first = self._flow.instruction(part[0]), self._flow.over[part[0]]
        return Value(each, part[1], slot, first, max(first, self._ends[part]))


def _arrays(of: Type, index: Index = ()) -> Iterator[tuple[Index, Type]]:
    if of.kind == "tuple":
        for k, part in enumerate(of.parts):
            yield from _arrays(part, (*index, k))
    elif of.kind != "token":
        yield index, of
