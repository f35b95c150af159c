"""Where in the user's program an instruction of XLA's comes from: its line and its named scopes.

XLA keeps of an operation the Python frames that traced it, and the names around it as one text. The
graph of the program knows which of the names are scopes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tracegrad.insight.value_flow import Operation
from tracegrad.ir import Graph
from tracegrad.ir.occurrence import Origin, origin_in


class ProgramLines:
    """The lines and the named scopes of a program."""

    def __init__(self, program: Graph):
        self._lines: set[tuple[str, int]] = set()
        self._scopes: dict[tuple[str, ...], list[str]] = {}  # and the words in their names
        for found in program.walk():
            scopes = found.scopes
            self._scopes[scopes] = [word for name in scopes for word in _words(name)]
            if (origin := found.origin) is not None:
                self._lines.add((origin.file, origin.line))

    def origin(self, made: Operation) -> Origin | None:
        """The line of an operation. A function that JAX has traced for another program has the
        frames of that program inside of the frames of this one."""
        here = (frame for frame in made.frames if (frame.file_name, frame.line_num) in self._lines)
        return origin_in(here)[0] or origin_in(made.frames)[0]

    def scopes(self, made: Operation) -> tuple[str, ...]:
        """The scopes of the program that the names around an operation tell of: the most that
        fit."""
        words = _words(made.path)
        among = (scopes for scopes, own in self._scopes.items() if _is_among(own, words))
        return max(among, key=len, default=())

    def told(self, made: Operation | None) -> str:
        """An operation, for people."""
        if made is None:
            return ""
        origin, of = self.origin(made), "the backward pass of " if made.is_backward else ""
        return f"{of}{made.name}" + (f" at {origin.place}" if origin else "")


def _words(path: str) -> list[str]:
    """What stands between the slashes and the brackets of a path."""
    return [word for word in re.split(r"[/()]", path) if word]


def _is_among(words: Iterable[str], all_words: Sequence[str]) -> bool:
    """Whether words are among others, in their order."""
    rest = iter(all_words)
    return all(word in rest for word in words)
