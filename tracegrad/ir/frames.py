"""The Python frames that bound a node, as code objects and where in them execution stood.

A line can call one function twice, and a loop a line again and again; the offset of the
instruction tells the first apart, and whether instructions jump back to before it the second.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple, TypeVar

from tracegrad import _jax
from tracegrad._jax.caches import of_program
from tracegrad.ir.nodes import Node
from tracegrad.ir.occurrence import origin_of_function

F = TypeVar("F", bound=Callable[..., Any])


class Mark:
    """A decorator for functions of this package by which their frames are known.

    By their names they are not: files and functions of the user's may be called as ours are.
    """

    def __init__(self) -> None:
        # By identity: code objects compare, and hash, by all they hold.
        self._codes: dict[int, CodeType] = {}

    def __call__(self, function: F) -> F:
        code = function.__code__
        self._codes[id(code)] = code
        return function

    def __contains__(self, code: object) -> bool:
        return id(code) in self._codes


# What a traced function is called by: who traced it is outside of it.
CALLS_TRACED = Mark()
# What puts a custom gradient in, or is the rule of one (the backward of a VJP), that is meant to be
# another gradient than that of its function.
CHANGES_GRADIENT = Mark()
# The backward of a rule that puts a gradient on what the host has computed: it is the derivative of
# that call, and not of its own function, which hands on the results.
OF_HOST_CALL = Mark()


class Frame(NamedTuple):
    """A Python function that was running, and the offset of the instruction that it was at."""

    code: CodeType
    at: int

    @property
    def line(self) -> int:
        return _lines(self.code).get(self.at, self.code.co_firstlineno)


class Stack(NamedTuple):
    """The frames of a node within the function of its region, innermost first.

    Code objects and offsets by themselves: a program has thousands of nodes of a hundred frames.
    """

    codes: list[CodeType]
    offsets: list[int]

    def key(self, start: int, stop: int | None = None) -> tuple[Any, ...]:
        """Equal for the same frames. (Code objects compare, and hash, by all they hold.)"""
        return (*map(id, self.codes[start:stop]), *self.offsets[start:stop])

    def frames(self, start: int, stop: int | None = None) -> tuple[Frame, ...]:
        return tuple(map(Frame, self.codes[start:stop], self.offsets[start:stop]))


def stack_of(node: Node, *, root: bool) -> Stack:
    """The stack of a node.

    `root`: it stands in the traced function itself; who traced that is left out.
    """
    codes, offsets = _jax.frame_positions(node.source.info)
    function = origin_of_function(node.function)
    file, line = (function.file, function.line) if function else ("", 0)
    for i, code in enumerate(codes):
        # Not by its name: most functions of a file of layers are called ``__call__``.
        if code.co_firstlineno == line and code.co_filename == file:
            return Stack(codes[: i + 1], offsets[: i + 1])
        if root and code in CALLS_TRACED:
            return Stack(codes[:i], offsets[:i])
    return Stack(codes, offsets)


def is_in_loop(frame: Frame) -> bool:
    """Whether the instruction stands in a loop of its function."""
    return any(start <= frame.at <= end for start, end in _loops(frame.code))


def loops_between(back: Frame, ahead: Frame) -> bool:
    """Whether a loop leads from one instruction of a function back to an earlier one."""
    return any(start <= back.at and ahead.at <= end for start, end in _loops(back.code))


@of_program
def _loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """The first and last instruction of each loop."""
    jumps = (i for i in dis.get_instructions(code) if "BACKWARD" in i.opname)
    return tuple((int(i.argval), i.offset) for i in jumps if isinstance(i.argval, int))


@of_program
def _lines(code: CodeType) -> dict[int, int]:
    lines: dict[int, int] = {}
    for start, end, line in code.co_lines():
        if line is not None:
            lines.update(dict.fromkeys(range(start, end, 2), line))
    return lines
