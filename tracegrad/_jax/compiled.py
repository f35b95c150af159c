"""What XLA has made of a program: what it writes to memory, in the order in which it does.

That is read off the text of the compiled program, since JAX has no other way to look into it that
every backend has. What cannot be read there is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

_COMPUTATION = re.compile(r"(ENTRY )?%?(\S+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\((.*)$")
_OPERANDS = re.compile(r"%([\w.\-]+)|^(\d+)\)")
_ARRAYS = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_SCOPES = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"\bcalls=%?([\w.\-]+)")

# Nothing is written for them.
_VIEWS = ("bitcast", "tuple", "get-tuple-element", "parameter", "constant", "optimization-barrier")
# The elements that were there, maybe in another order or precision (CPUs compute bfloat16 in
# float32).
_COPIES = ("bitcast", "copy", "reshape", "transpose", "convert")

_T = TypeVar("_T")


class Written(NamedTuple):
    """What an instruction writes to memory.

    Attributes:
      size: bytes.
      scopes: the named scopes under which the operations were traced whose results it holds,
        ``jit(f)/jvp(block)/mul``: of several that run as one, the last.
      inside: those of the others, whose results are nowhere in memory.
      reads: what it reads of what was written before, by its place; not arguments.
    """

    size: int
    scopes: tuple[str, ...]
    inside: tuple[str, ...]
    reads: tuple[int, ...]


def written_by(text: str) -> list[Written]:
    """What a program writes to memory, in order; what a loop writes inside is left out.

    `text`: that of a compiled program (`jax.stages.Compiled.as_text`).
    """
    entry, others = _parsed(text)
    found: list[Written] = []
    places: dict[str, tuple[int, ...]] = {}  # of what an instruction is, or is a view of
    for each in entry.values():
        reads = _once(k for name in each.operands for k in places.get(name, ()))
        if each.op in _VIEWS:
            places[each.name] = reads
            continue
        body = others.get(each.called, {}) if each.op == "fusion" else {}
        last = list(_last(body, [v.name for v in body.values() if v.is_result])) or [each]
        scopes = [scope for end in last if end.op != "parameter" for scope in end.scopes]
        if not scopes:  # it copies what it reads
            copied = [each.operands[int(end.operands[0])] for end in last if end.op == "parameter"]
            if each.op in _COPIES:
                copied += each.operands
            scopes = [s for name in copied for k in places.get(name, ()) for s in found[k].scopes]
        inside = (scope for v in _all_of(body, others) if v not in last for scope in v.scopes)
        places[each.name] = (len(found),)
        found.append(Written(each.size, _once(scopes), _once(inside), reads))
    return found


class _Instruction(NamedTuple):
    """One line of the text; the operand of a parameter is its number."""

    name: str
    op: str
    operands: list[str]
    size: int
    scopes: list[str]
    called: str
    is_result: bool


_Computation = dict[str, _Instruction]


def _all_of(body: _Computation, others: Mapping[str, _Computation]) -> Iterator[_Instruction]:
    """The instructions of a computation, and of those that they run as one (on TPUs)."""
    for each in body.values():
        yield each
        yield from _all_of(others.get(each.called, {}), others)


def _last(body: Mapping[str, _Instruction], names: Iterable[str]) -> Iterator[_Instruction]:
    """The instructions that compute what some of a computation are, or are copies of."""
    for name in names:
        if name in body:
            now = body[name]
            passes_on = now.op == "tuple" or (now.op in _COPIES and not now.scopes)
            yield from _last(body, now.operands) if passes_on else [now]


def _parsed(text: str) -> tuple[_Computation, dict[str, _Computation]]:
    """The computation that is run, and those that it calls, by name."""
    entry: _Computation = {}
    others: dict[str, _Computation] = {}
    here: _Computation = {}
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            here = {}
            if begins[1]:
                entry = here
            else:
                others[begins[2]] = here
        elif found := _INSTRUCTION.match(line):
            root, name, types, op, rest = found.groups()
            scopes, called = _SCOPES.search(rest), _CALLED.search(rest)
            here[name] = _Instruction(
                name=name,
                op=op,
                operands=[a or b for a, b in _OPERANDS.findall(_arguments(rest))],
                size=sum(_nbytes(kind, shape) for kind, shape in _ARRAYS.findall(types)),
                scopes=scopes[1].split(";") if scopes else [],
                called=called[1] if called else "",
                is_result=root is not None,
            )
    return entry, others


def _arguments(rest: str) -> str:
    """What stands up to the bracket that closes, and that."""
    depth = 1
    for k, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[: k + 1]
    return rest


def _nbytes(kind: str, shape: str) -> int:
    """Of ``bf16`` and ``8,512``; what has no bits in its name, as ``pred``, is a byte each."""
    bits = re.search(r"\d+", kind)
    sizes = re.findall(r"\d+", shape)
    return math.prod(map(int, sizes)) * (int(bits[0]) if bits else 8) // 8


def _once(found: Iterable[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(found))
