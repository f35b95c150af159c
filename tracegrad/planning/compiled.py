"""What XLA has made of a program: the bytes that it holds, and what it writes, in order."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from tracegrad import _jax
from tracegrad.planning.hlo import Computation, Instruction, Module

# Nothing is written for them.
_VIEWS = ("bitcast", "tuple", "get-tuple-element", "parameter", "constant", "opt-barrier")
# The elements that were there, maybe in another order or precision (CPUs compute bfloat16 in
# float32).
COPIES = ("bitcast", "copy", "reshape", "transpose", "convert")

_T = TypeVar("_T")


class NotMeasuredError(Exception):
    """A program could not be compiled here, by itself."""


def account_of(compiled: Any, device: Any) -> Any:
    """XLA's account of the memory of a program compiled for a device, on each such device.

    Raises NotMeasuredError if the backend does not say.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise NotMeasuredError(f"{_jax.compiled_by(device)} does not say what a program holds")
    return analysis


@contextmanager
def saying_why_not() -> Iterator[None]:
    """A block that compiles: whatever JAX or XLA cannot do with a part of a program is a
    NotMeasuredError in their words."""
    try:
        yield
    except NotMeasuredError:
        raise
    except Exception as error:
        raise NotMeasuredError(f"{type(error).__name__}: {error}".splitlines()[0]) from error


class Written(NamedTuple):
    """What an instruction writes to memory.

    Attributes:
      size: bytes.
      scopes: the named scopes under which the operations were traced whose results it holds,
        ``jit(f)/jvp(block)/mul``: of several that run as one, the last.
      inside: those of the others, whose results are nowhere in memory.
      reads: what it reads of what was written before, by its place; not arguments.
      until: the place of the last that reads it for what nothing before has computed of it, or of
        which only a part was written; its own if nothing does. What XLA computes anew inside of a
        later one is no other reason to keep it: where a barrier comes between, that is written.
    """

    size: int
    scopes: tuple[str, ...]
    inside: tuple[str, ...]
    reads: tuple[int, ...]
    until: int


def written_by(module: Module) -> list[Written]:
    """What a program writes to memory, in order; what a loop writes inside is left out."""
    found: list[Written] = []
    until: dict[int, int] = {}
    computed = set[tuple[int, Hashable]]()
    places: dict[int, tuple[int, ...]] = {}  # of what an instruction is, or is a view of
    for key, each in module.entry.instructions.items():
        reads = _once(k for operand in each.operands for k in places.get(operand, ()))
        if each.op in _VIEWS:
            places[key] = reads
            continue
        inner = module.computations[each.called[0]] if each.op == "fusion" else None
        last = list(_last(inner.instructions, inner.root)) if inner else [each]
        scopes = [scope for end in last if end.op != "parameter" for scope in end.scopes]
        if not scopes:  # it copies what it reads
            copied = [each.operands[end.number] for end in last if end.op == "parameter"]
            if each.op in COPIES:
                copied += each.operands
            scopes = [s for k in copied for j in places.get(k, ()) for s in found[j].scopes]
        parts = _all_of(inner, module.computations) if inner else ()
        inside = (scope for v in parts if v not in last for scope in v.scopes)
        written, is_part = {_use(end) for end in last}, any(end.slices for end in last)
        for number, operand in enumerate(each.operands):
            uses = list(_uses(inner.instructions, number)) if inner else [_use(each)]
            for now in itertools.product(places.get(operand, ()), uses or [key]):
                if now not in computed:
                    until[now[0]] = len(found)
                if now[1] in written or not is_part:
                    computed.add(now)
        places[key] = (len(found),)
        found.append(Written(each.type.nbytes, _once(scopes), _once(inside), reads, len(found)))
    return [each._replace(until=until.get(k, k)) for k, each in enumerate(found)]


def _uses(body: Mapping[int, Instruction], number: int) -> Iterator[Hashable]:
    """What a computation computes of its parameter of a number."""
    same = {each.key for each in body.values() if (each.op, each.number) == ("parameter", number)}
    for each in body.values():
        if not same.isdisjoint(each.operands):
            if each.op in (*COPIES, "broadcast", "tuple") and not each.scopes:
                same.add(each.key)
            else:
                yield _use(each)


def _use(each: Instruction) -> Hashable:
    """What an instruction computes of its operands: equal for copies of one instruction."""
    return (*each.scopes, each.slices) if each.scopes else each.key


def _all_of(body: Computation, others: Mapping[int, Computation]) -> Iterator[Instruction]:
    """The instructions of a computation, and of those that they run as one (on TPUs)."""
    for each in body.instructions.values():
        yield each
        if each.op == "fusion":
            yield from _all_of(others[each.called[0]], others)


def _last(body: Mapping[int, Instruction], now: Instruction) -> Iterator[Instruction]:
    """The instructions that compute what one of a computation is, or is a copy of."""
    if now.op == "tuple" or (now.op in COPIES and not now.scopes):
        for operand in now.operands:
            yield from _last(body, body[operand])
    else:
        yield now


def _once(found: Iterable[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(found))
