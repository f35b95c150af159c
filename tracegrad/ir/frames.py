"""The Python frames in which JAX bound a node: their code objects and current instructions.

A line can call a function twice: the offset of the instruction distinguishes the two calls. A loop
can run a line many times: jumps back in the code show whether an instruction is in a loop.
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
    """A decorator that marks functions of this package, so that their frames can be recognised.
    Names do not suffice: the user's files and functions may have the same names."""

    def __init__(self) -> None:
        # By identity: code objects compare, and hash, by their whole contents.
        self._codes: dict[int, CodeType] = {}

    def __call__(self, function: F) -> F:
        code = function.__code__
        self._codes[id(code)] = code
        return function

    def __contains__(self, code: object) -> bool:
        return id(code) in self._codes


# Marks the functions that call a traced function: frames outside of them belong to the tracer.
CALLS_TRACED = Mark()
# Marks functions that insert a custom gradient which differs on purpose from the derivative of its
# function, and the rules (backward functions of VJPs) of such custom gradients.
CHANGES_GRADIENT = Mark()
# Marks the backward function of a rule that gives the results of a host call a gradient. The
# backward function is the derivative of the host call, although the rule's primal function is the
# identity of the results.
OF_HOST_CALL = Mark()


class Frame(NamedTuple):
    """A code object and the offset of its current instruction."""

    code: CodeType
    at: int

    @property
    def line(self) -> int:
        return _map_offsets_to_lines(self.code).get(self.at, self.code.co_firstlineno)


class Stack(NamedTuple):
    """The frames of a node within the function of its region, innermost first. Two lists take less
    time than a list of `Frame`: a program has thousands of nodes with a hundred frames each."""

    codes: list[CodeType]
    offsets: list[int]

    def key(self, start: int) -> tuple[Any, ...]:
        """Returns a key that is equal for the same frames; it has the ids of the code objects."""
        return (*map(id, self.codes[start:]), *self.offsets[start:])

    def frames(self, start: int, stop: int | None = None) -> tuple[Frame, ...]:
        return tuple(map(Frame, self.codes[start:stop], self.offsets[start:stop]))


def stack_of(node: Node, *, root: bool) -> Stack:
    """Returns the frames of a node. If `root`, the node is in the traced function itself, and the
    stack omits the frames of the function's callers."""
    codes, offsets = _jax.frame_positions(node.source.info)
    function = origin_of_function(node.function)
    file, line = (function.file, function.line) if function else ("", 0)
    end = len(codes)
    for i, code in enumerate(codes):
        # By line and not by name: in a file of layers, most functions are named ``__call__``. The
        # outermost such frame counts: a function may call itself, as nested `Sequential`s do.
        if code.co_firstlineno == line and code.co_filename == file:
            end = i + 1
        if root and code in CALLS_TRACED:
            end = min(i, end)
            break
    return Stack(codes[:end], offsets[:end])


def is_in_loop(frame: Frame) -> bool:
    return any(start <= frame.at <= end for start, end in _find_loops(frame.code))


def has_loop_around(back: Frame, ahead: Frame) -> bool:
    """Whether a loop contains both instructions, so that it can lead from `ahead` to `back`."""
    return any(start <= back.at and ahead.at <= end for start, end in _find_loops(back.code))


@of_program
def _find_loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Returns the offsets of the first and last instruction of each loop."""
    jumps = (i for i in dis.get_instructions(code) if "BACKWARD" in i.opname)
    return tuple((int(i.argval), i.offset) for i in jumps if isinstance(i.argval, int))


@of_program
def _map_offsets_to_lines(code: CodeType) -> dict[int, int]:
    lines: dict[int, int] = {}
    for start, end, line in code.co_lines():
        if line is not None:
            lines.update(dict.fromkeys(range(start, end, 2), line))
    return lines
