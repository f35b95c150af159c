"""Decodes a program that XLA has compiled: its instructions, in the order in which they run.

The source is the serialized module (`HloModuleProto` of ``xla/service/hlo.proto``), which
`jax.stages.Compiled` returns for every backend. Unlike the text of a module, the serialized module
says which buffer belongs to which instruction. Only the needed fields are decoded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tracegrad import _jax

# The element types of `PrimitiveType` in ``xla/xla_data.proto``, by number.
_KINDS = """
    invalid pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128
    f8e5m2 f8e4m3fn s4 u4 f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn
    f8e8m0fnu buffer f6e3m2fn f6e2m3fn
    """.split()  # noqa: SIM905

Message = dict[int, list[Any]]  # maps a field to its values: numbers, or bytes


class Type(NamedTuple):
    """The type of an array (``f32[64,512]``), or of a tuple, which has `parts`. `memory` is the
    number of the device's memory that holds the value; 0 is the main memory."""

    kind: str
    shape: tuple[int, ...]
    parts: tuple[Type, ...]
    memory: int = 0

    @property
    def nbytes(self) -> int:
        """A kind without bits in its name (``pred``) has 8 bits."""
        if self.kind == "tuple":
            return sum(part.nbytes for part in self.parts)
        bits = re.search(r"\d+", self.kind)
        return -(-math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8)

    def at(self, index: tuple[int, ...]) -> Type:
        """`index` has a position for each level of the nested tuple."""
        return self.parts[index[0]].at(index[1:]) if index else self

    def __str__(self) -> str:
        return f"{self.kind}[{','.join(map(str, self.shape))}]"


class Instruction(NamedTuple):
    """An instruction of a computation.

    Attributes:
      op: the operation, for example ``dot``.
      operands: the keys of the operands.
      called: the keys of the computations that the instruction runs.
      scopes: the named scopes of the operations that XLA made the instruction of
        (``jit(f)/jvp(block)/mul``). For a parameter, its name (``params['w']``).
      frame: the innermost Python frame that traced the operation, for `Module.frames`; 0 for none.
      number: the number of a parameter, or the index of a tuple's part (``get-tuple-element``).
      slices: the slice of each axis that a slice takes, as encoded by XLA.
    """

    key: int
    op: str
    type: Type
    operands: list[int]
    called: list[int]
    scopes: list[str]
    frame: int
    number: int
    slices: bytes


class Computation(NamedTuple):
    """Instructions by their keys, in the order in which they run; `root` computes the result."""

    key: int
    root: Instruction
    instructions: Mapping[int, Instruction]


class HloFrame(NamedTuple):
    """A Python frame, with the attribute names that JAX uses for the frames of equations."""

    file_name: str
    line_num: int
    function_name: str


class Module:
    """A compiled program: `entry`, the computation that runs first, and all computations by key."""

    def __init__(self, message: bytes):
        module = decoded(message)
        self._frames = decoded(first(module, 17, b""))
        self._files, self._functions = (
            [name.decode() for name in self._frames.get(field, ())] for field in (1, 2)
        )
        entries = map(decoded, decoded(first(module, 7, b"")).get(1, ()))
        order = {first(e, 1): numbers(decoded(first(e, 2, b"")), 1) for e in entries}
        made = (_read_computation(decoded(each), order) for each in module.get(3, ()))
        self.computations = {computation.key: computation for computation in made}
        self.entry = self.computations[first(module, 6)]

    def frames(self, frame: int) -> Iterator[HloFrame]:
        """Innermost first."""
        while frame:
            here = decoded(self._frames[4][frame - 1])
            place = decoded(self._frames[3][first(here, 1) - 1])
            file, function = self._files[first(place, 1) - 1], self._functions[first(place, 2) - 1]
            yield HloFrame(file, first(place, 3), function)
            frame = first(here, 2)


def module_of(compiled: Any) -> Module:
    module, *_ = compiled.runtime_executable().hlo_modules()
    return Module(module.as_serialized_hlo_module_proto())


# With these settings, instructions of programs that are compiled keep the Python frames that traced
# them, and JAX's disk cache does not return another program with the same instructions.
_LINES = {
    "jax_traceback_in_locations_limit": 1000,
    "jax_compilation_cache_include_metadata_in_key": True,
}
lines_kept = _jax.settings(_LINES)


def _read_computation(message: Message, order: Mapping[int, list[int]]) -> Computation:
    made = {each.key: each for each in map(_read_instruction, map(decoded, message.get(2, ())))}
    key = first(message, 5)
    in_order = {k: made[k] for k in order.get(key, made)}
    return Computation(key, made[first(message, 6)], in_order)


def _read_instruction(message: Message) -> Instruction:
    op, told = first(message, 2).decode(), decoded(first(message, 7, b""))
    scopes = first(told, 2, b"").decode()
    return Instruction(
        key=first(message, 35),
        op=op,
        type=_read_type(decoded(first(message, 3, b""))),
        operands=numbers(message, 36),
        called=numbers(message, 38),
        scopes=scopes.split(";") if scopes else [],
        frame=first(told, 15),
        number=first(message, 9 if op == "parameter" else 13),
        slices=b"".join(message.get(17, ())),
    )


def _read_type(message: Message) -> Type:
    kind = first(message, 2)
    parts = tuple(_read_type(decoded(part)) for part in message.get(4, ()))
    name = _KINDS[kind] if kind < len(_KINDS) else "opaque"
    memory = first(decoded(first(message, 5, b"")), 8)
    return Type(name, tuple(numbers(message, 3)), parts, memory)


# --------------------------------------------------------------------------------------- messages


def decoded(message: bytes) -> Message:
    """Decodes a message of Protocol Buffers (https://protobuf.dev/programming-guides/encoding)."""
    found: Message = {}
    at, end = 0, len(message)
    while at < end:
        tag, at = _read_varint(message, at)
        field = found.setdefault(tag >> 3, [])
        match tag & 7:
            case 0:
                number, at = _read_varint(message, at)
                field.append(number)
                continue
            case 1:
                size = 8
            case 2:
                size, at = _read_varint(message, at)
            case 5:
                size = 4
            case width:
                raise ValueError(f"XLA's module has a field of the unknown wire type {width}")
        field.append(message[at : at + size])
        at += size
    return found


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Also returns the position behind the number."""
    byte = message[at]
    number, shift, at = byte & 127, 7, at + 1
    while byte > 127:
        byte = message[at]
        number, shift, at = number | (byte & 127) << shift, shift + 7, at + 1
    return number, at


def first(message: Message, field: int, default: Any = 0) -> Any:
    """Returns the value of a field that occurs at most once."""
    return message.get(field, (default,))[0]


def numbers(message: Message, field: int) -> list[int]:
    """Reads a repeated field of numbers, which may be packed into bytes."""
    found = []
    for each in message.get(field, ()):
        if isinstance(each, int):
            found.append(each)
            continue
        at = 0
        while at < len(each):
            number, at = _read_varint(each, at)
            found.append(number)
    return found
