"""The Python frames that bound a node, as code objects and where in them execution stood.

A line can call one function twice, and a loop a line again and again; the offset of the
instruction tells the first apart, and whether instructions jump back to before it the second.
"""

from __future__ import annotations

import dis
import functools
import os.path
import re
from types import CodeType
from typing import TYPE_CHECKING, NamedTuple

from tracegrad import _jax
from tracegrad.ir.nodes import Node

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph

_TRACING = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tracing", "")


class Frame(NamedTuple):
    """A Python function that was running, and the offset of the instruction that it was at."""

    code: CodeType
    at: int

    @property
    def line(self) -> int:
        return _lines(self.code).get(self.at, self.code.co_firstlineno)


def frames_of(node: Node, region: Graph, *, root: bool) -> tuple[Frame, ...]:
    """The frames of a node within the function of its region, innermost first.

    `root`: the region is the traced function itself; who traced it is left out.
    """
    if node.source is None:
        return ()
    positions = _jax.frame_positions(node.source.info)
    end = len(positions)
    function = re.fullmatch(r"(.+?) at (.+):(\d+)", region.function_source)
    for i, (code, _) in enumerate(positions):
        if root and code.co_filename.startswith(_TRACING):
            end = i
            break
        if function and code.co_filename == function[2] and code.co_name == function[1]:
            end = i + 1
            break
    return tuple(Frame(code, at) for code, at in positions[:end])


def is_in_loop(frame: Frame) -> bool:
    """Whether the instruction stands in a loop of its function."""
    return any(start <= frame.at <= end for start, end in _loops(frame.code))


def loops_between(back: Frame, ahead: Frame) -> bool:
    """Whether a loop leads from one instruction of a function back to an earlier one."""
    return any(start <= back.at and ahead.at <= end for start, end in _loops(back.code))


@functools.lru_cache(maxsize=4096)
def _loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """The first and last instruction of each loop."""
    jumps = (i for i in dis.get_instructions(code) if "BACKWARD" in i.opname)
    return tuple((int(i.argval), i.offset) for i in jumps if isinstance(i.argval, int))


@functools.lru_cache(maxsize=4096)
def _lines(code: CodeType) -> dict[int, int]:
    lines: dict[int, int] = {}
    for start, end, line in code.co_lines():
        if line is not None:
            lines.update(dict.fromkeys(range(start, end, 2), line))
    return lines
