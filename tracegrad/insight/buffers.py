"""The peak of a compiled program, in XLA's own buffers, told by the graph that it was compiled of.

XLA keeps of an operation the Python frames that traced it, and the names around it as one text (see
`xla_buffers`). The graph knows which of the names are scopes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tracegrad.insight.value_flow import Operation
from tracegrad.insight.xla_buffers import Account, Buffer
from tracegrad.ir import Graph
from tracegrad.ir.occurrence import Origin, origin_in
from tracegrad.ir.scopes import UNDER_RULES

_Place = tuple[str, int, bool]  # a file, a line, and whether it is of the backward pass


Kind = Literal["argument", "constant", "result", "residual", "gradient", "activation"]


@dataclass(frozen=True)
class Held:
    """A buffer that is in use at the peak.

    Attributes:
      size: bytes.
      kind: ``argument``, ``constant``, ``result``, ``residual`` (of the forward pass, for the
        backward pass), ``gradient`` (of the backward pass) or ``activation``.
      type: of what is in it, ``f32[64,512]``.
      line: where that is computed, ``model.py:12 (Block.__call__)``; "" for what is not.
      origin: that line, where it is known.
      scopes: the names of the scopes around it.
      kept_for: the operation at the peak or after it that reads it next; of what the forward pass
        makes, the next of the backward pass that does.
      alive: from when to when, as shares of the program.
    """

    size: int
    kind: Kind
    type: str
    line: str
    origin: Origin | None
    scopes: tuple[str, ...]
    kept_for: str
    alive: tuple[float, float]

    @property
    def is_recomputed(self) -> bool:
        """Whether it is in a part that the program recomputes already."""
        return not {"checkpoint", "rematted_computation"}.isdisjoint(self.scopes)

    @property
    def scope(self) -> str:
        """The scopes, for people, without those of rules and of JAX around what is recomputed,
        which is in the same scopes once more."""
        own = [name for name in self.scopes if name not in _AROUND]
        if len(own) < len(self.scopes):
            own = own[max((k for k, name in enumerate(own) if name == own[0]), default=0) :]
        return "/".join(own)


@dataclass(frozen=True)
class Peak:
    """The highest point of a program: the operation there, what is alive, and bytes at each."""

    program: Graph
    at: str
    held: tuple[Held, ...]
    timeline: tuple[int, ...]


def peak_of_buffers(graph: Graph, account: Account) -> Peak:
    """The peak of what was compiled of a graph, as XLA tells it."""
    known = _Known(graph)
    held = tuple(known.held(buffer) for buffer in account.buffers)
    return Peak(graph, known.told(account.at), held, account.timeline)


class _Known:
    """The lines and the named scopes of a program."""

    def __init__(self, program: Graph):
        self._lines: set[tuple[str, int]] = set()
        self._scopes: dict[tuple[str, ...], list[str]] = {}  # and the words in their names
        for made in program.walk():
            scopes = made.scopes
            self._scopes[scopes] = [word for name in scopes for word in _words(name)]
            if (origin := made.origin) is not None:
                self._lines.add((origin.file, origin.line))

    def held(self, buffer: Buffer) -> Held:
        """A buffer, told by what it holds in the graph."""
        made, kind = buffer.made, _kind(buffer)
        kept_for = "what is returned" if kind == "result" else self.told(buffer.reader)
        line, origin = "", None
        scopes: tuple[str, ...] = ()
        if kind != "argument" and made is not None and not made.name:
            line = f"copy of {made.path}"
        elif kind != "argument" and made is not None:
            origin, scopes = self.origin(made), self._scopes_in(made.path)
            line = str(origin or f"XLA's {made.name}")
        return Held(buffer.size, kind, buffer.type, line, origin, scopes, kept_for, buffer.alive)

    def origin(self, made: Operation) -> Origin | None:
        """Where it comes from. Of a function that JAX has traced for another program it has the
        frames of that, inside of those of this one."""
        here = (frame for frame in made.frames if (frame.file_name, frame.line_num) in self._lines)
        return origin_in(here)[0] or origin_in(made.frames)[0]

    def told(self, made: Operation | None) -> str:
        """An operation, for people."""
        if made is None:
            return ""
        origin, of = self.origin(made), "the backward pass of " if made.is_backward else ""
        return f"{of}{made.name}" + (f" at {origin.place}" if origin else "")

    def _scopes_in(self, path: str) -> tuple[str, ...]:
        """The scopes of the program that XLA's path of names tells of: the most that fit."""
        words = _words(path)
        among = (scopes for scopes, own in self._scopes.items() if _is_among(own, words))
        return max(among, key=len, default=())


_AROUND = (UNDER_RULES, "checkpoint", "rematted_computation")


def _words(path: str) -> list[str]:
    """What stands between the slashes and the brackets of a path."""
    return [word for word in re.split(r"[/()]", path) if word]


def _is_among(words: Iterable[str], all_words: Sequence[str]) -> bool:
    """Whether words are among others, in their order."""
    rest = iter(all_words)
    return all(word in rest for word in words)


def _kind(buffer: Buffer) -> Kind:
    if buffer.kind != "temporary":
        return buffer.kind
    if buffer.made is not None and buffer.made.is_backward:
        return "gradient"
    return "residual" if buffer.is_read_back else "activation"
