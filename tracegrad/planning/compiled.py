"""Reads a compiled program: the bytes that XLA holds, and the buffers that it writes, in order."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from tracegrad import _jax
from tracegrad.planning.hlo import Computation, Instruction, Module

# Operations of HLO that write no buffer.
_VIEWS = ("bitcast", "tuple", "get-tuple-element", "parameter", "constant", "opt-barrier")
# Operations that keep the elements, maybe in another order or precision (CPUs compute bfloat16 in
# float32).
COPIES = ("bitcast", "copy", "reshape", "transpose", "convert")

_T = TypeVar("_T")


class NotMeasuredError(Exception):
    """A program cannot be compiled on this machine, or cannot be compiled by itself."""


def account_of(compiled: Any, device: Any) -> Any:
    """Bytes are per device. Raises NotMeasuredError if the backend has no such analysis."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise NotMeasuredError(f"{_jax.compiled_by(device)} does not say what a program holds")
    return analysis


@contextmanager
def saying_why_not() -> Iterator[None]:
    """Turns any error of JAX or XLA into a NotMeasuredError."""
    try:
        yield
    except NotMeasuredError:
        raise
    except Exception as error:
        raise NotMeasuredError(f"{type(error).__name__}: {error}".splitlines()[0]) from error


class WrittenBuffer(NamedTuple):
    """A buffer that an instruction writes to memory; buffers are numbered in the order of writing.

    Attributes:
      size: in bytes.
      scopes: the named scopes (``jit(f)/jvp(block)/mul``) of the operations whose results the
        buffer holds. Of several fused operations, only the last ones have results in memory.
      inside: the scopes of the other fused operations, whose results are not in memory.
      reads: the numbers of the earlier buffers that the instruction reads; not arguments.
      until: the number of the last buffer whose instruction keeps this buffer alive; without such
        an instruction, this buffer's own number. A reader keeps the buffer alive if the reader
        computes a new value: a value that no earlier reader has computed, or that was written in
        part only. A reader that recomputes an earlier value inside a fusion does not keep the
        buffer alive: if a barrier comes between, XLA writes the value instead.
    """

    size: int
    scopes: tuple[str, ...]
    inside: tuple[str, ...]
    reads: tuple[int, ...]
    until: int


def written_by(module: Module) -> list[WrittenBuffer]:
    """In order, without the buffers inside of loops."""
    found: list[WrittenBuffer] = []
    until: dict[int, int] = {}
    computed = set[tuple[int, Hashable]]()
    places: dict[int, tuple[int, ...]] = {}  # the buffers that an instruction is, or is a view of
    for key, each in module.entry.instructions.items():
        reads = _remove_repetitions(k for operand in each.operands for k in places.get(operand, ()))
        if each.op in _VIEWS:
            places[key] = reads
            continue
        inner = module.computations[each.called[0]] if each.op == "fusion" else None
        last = list(_defining_instructions(inner.instructions, inner.root)) if inner else [each]
        scopes = [scope for end in last if end.op != "parameter" for scope in end.scopes]
        if not scopes:  # it copies its operands
            copied = [each.operands[end.number] for end in last if end.op == "parameter"]
            if each.op in COPIES:
                copied += each.operands
            scopes = [s for k in copied for j in places.get(k, ()) for s in found[j].scopes]
        parts = _instructions_inside(inner, module.computations) if inner else ()
        inside = (scope for v in parts if v not in last for scope in v.scopes)
        written, is_part = {_use_key(end) for end in last}, any(end.slices for end in last)
        for number, operand in enumerate(each.operands):
            uses = list(_parameter_uses(inner.instructions, number)) if inner else [_use_key(each)]
            for now in itertools.product(places.get(operand, ()), uses or [key]):
                if now not in computed:
                    until[now[0]] = len(found)
                if now[1] in written or not is_part:
                    computed.add(now)
        places[key] = (len(found),)
        found.append(
            WrittenBuffer(
                each.type.nbytes,
                _remove_repetitions(scopes),
                _remove_repetitions(inside),
                reads,
                len(found),
            )
        )
    return [each._replace(until=until.get(k, k)) for k, each in enumerate(found)]


def _parameter_uses(body: Mapping[int, Instruction], number: int) -> Iterator[Hashable]:
    """Copies of the parameter count as the parameter."""
    same = {each.key for each in body.values() if (each.op, each.number) == ("parameter", number)}
    for each in body.values():
        if not same.isdisjoint(each.operands):
            if each.op in (*COPIES, "broadcast", "tuple") and not each.scopes:
                same.add(each.key)
            else:
                yield _use_key(each)


def _use_key(each: Instruction) -> Hashable:
    """Copies of one instruction have equal keys."""
    return (*each.scopes, each.slices) if each.scopes else each.key


def _instructions_inside(
    body: Computation, others: Mapping[int, Computation]
) -> Iterator[Instruction]:
    """Also yields the instructions of fusions inside of the computation (on TPUs)."""
    for each in body.instructions.values():
        yield each
        if each.op == "fusion":
            yield from _instructions_inside(others[each.called[0]], others)


def _defining_instructions(
    body: Mapping[int, Instruction], now: Instruction
) -> Iterator[Instruction]:
    """Looks through copies and tuples."""
    if now.op == "tuple" or (now.op in COPIES and not now.scopes):
        for operand in now.operands:
            yield from _defining_instructions(body, body[operand])
    else:
        yield now


def _remove_repetitions(found: Iterable[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(found))
