"""The peak of a compiled program, in XLA's own buffers, told by the graph that it was compiled of.

XLA keeps of an operation the Python frames that traced it, and the names around it as one text (see
`xla_buffers`). The graph knows which of the names are scopes. Of the graph's operations on
that line and in these scopes, the one that is most like what XLA runs is taken to be the one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tracegrad.insight.value_flow import Operation
from tracegrad.insight.xla_buffers import Account, Buffer
from tracegrad.ir import Graph, Occurrence, Value
from tracegrad.ir.occurrence import Origin, origin_in
from tracegrad.ir.scopes import UNDER_RULES, is_backward
from tracegrad.planning.costs import nbytes
from tracegrad.planning.flatten import flatten

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
      scope: the named scopes around it.
      kept_for: the operation at the peak or after it that reads it next; of what the forward pass
        makes, the next of the backward pass that does.
      alive: from when to when, as shares of the program.
      source: the operation that computes it; of the results of a loop the one inside of it; None
        for arguments and constants, and where it is not known.
    """

    size: int
    kind: Kind
    type: str
    line: str
    scope: str
    kept_for: str
    alive: tuple[float, float]
    source: Occurrence | None


@dataclass(frozen=True)
class Peak:
    """The highest point of a program: the operation there, what is alive, and bytes at each."""

    program: Graph
    at: str
    held: tuple[Held, ...]
    timeline: tuple[int, ...]


def peak_of_buffers(graph: Graph, account: Account) -> Peak:
    """The peak of what was compiled of a graph, as XLA tells it."""
    program = flatten(graph)
    known = _Known(program)
    held = tuple(known.held(buffer) for buffer in account.buffers)
    return Peak(program, known.told(account.at), held, account.timeline)


class _Found(NamedTuple):
    """An operation of the graph, and the names of the scopes around it."""

    made: Occurrence
    scopes: tuple[str, ...]
    words: tuple[str, ...]


class _Alike:
    """Values that buffers may be of, each for one before any for two."""

    def __init__(self, values: Sequence[tuple[Occurrence, Value]]):
        self._new = iter(values)
        self._again = itertools.cycle(values)

    def take(self, taken: set[Value]) -> Occurrence | None:
        """What computes the next; `taken` are those of which there are buffers."""
        found = next((each for each in self._new if each[1] not in taken), None)
        found = found or next(self._again, None)
        if found is None:
            return None
        taken.add(found[1])
        return found[0]


class _Known:
    """The operations of a program, by the line that they came from."""

    def __init__(self, program: Graph):
        self._by_place: dict[_Place, list[_Found]] = {}
        self._lines: set[tuple[str, int]] = set()
        self._alike: dict[Any, _Alike] = {}
        self._taken: set[Value] = set()
        self._scopes: dict[tuple[str, ...], tuple[str, ...]] = {}
        for made in program.walk():
            scopes = made.scopes
            words = tuple(word for name in scopes for word in _words(name))
            self._scopes[scopes] = words
            if (origin := made.origin) is not None:
                place = origin.file, origin.line, any(map(is_backward, made.steps))
                self._by_place.setdefault(place, []).append(_Found(made, scopes, words))
                self._lines.add(place[:2])

    def held(self, buffer: Buffer) -> Held:
        """A buffer, told by what it holds in the graph."""
        made, kind = buffer.made, _kind(buffer)
        kept_for = "what is returned" if kind == "result" else self.told(buffer.reader)
        line, scope = "", ""
        source: Occurrence | None = None
        if kind != "argument" and made is not None and not made.name:
            line = f"copy of {made.path}"
        elif kind != "argument" and made is not None:
            origin = self.origin(made)
            source = self._source(made, origin, buffer.size)
            scope = _scope_of(self._scopes_in(made.path) if source is None else source.scopes)
            line = str(origin or f"XLA's {made.name}")
        return Held(
            buffer.size,
            kind,
            buffer.type,
            line,
            scope,
            kept_for,
            buffer.alive,
            source,
        )

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

    def _source(self, made: Operation, origin: Origin | None, size: int) -> Occurrence | None:
        """What is most like it in the graph: where it is, what it does, how large it is; rather
        what no other buffer is of."""
        if origin is None:
            return None
        place = origin.file, origin.line, made.is_backward
        key = place, made.path, made.name, size
        if key not in self._alike:
            words = _words(made.path)
            likely = [
                ((len(f.scopes), f.made.node.op == made.name, nbytes(v.aval) == size), f.made, v)
                for f in self._by_place.get(place, ())
                if _is_among(f.words, words)
                for v in f.made.node.outputs
            ]
            most = max((likeness for likeness, _, _ in likely), default=None)
            self._alike[key] = _Alike([(f, v) for likeness, f, v in likely if likeness == most])
        return self._alike[key].take(self._taken)

    def _scopes_in(self, path: str) -> tuple[str, ...]:
        words = _words(path)
        among = (scopes for scopes, own in self._scopes.items() if _is_among(own, words))
        return max(among, key=len, default=())


_AROUND = (UNDER_RULES, "checkpoint", "rematted_computation")


def _scope_of(names: Sequence[str]) -> str:
    """Named scopes, for people, without those of rules and of JAX around what is recomputed, which
    is in the same scopes once more."""
    own = [name for name in names if name not in _AROUND]
    if len(own) < len(names):
        own = own[max((k for k, name in enumerate(own) if name == own[0]), default=0) :]
    return "/".join(own)


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
