"""The line of the user's code and the named scopes that an instruction of XLA comes from.

XLA keeps two things for each operation: the Python frames that traced it, and the names around it
as one text. The graph of the program tells which of these names are scopes.
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
        self._scopes: dict[tuple[str, ...], list[str]] = {}  # scopes: the words of their names
        for found in program.walk():
            scopes = found.scopes
            self._scopes[scopes] = [word for name in scopes for word in _split_path(name)]
            if (origin := found.origin) is not None:
                self._lines.add((origin.file, origin.line))

    def origin(self, made: Operation) -> Origin | None:
        """Returns the user's line of an operation.

        If JAX had traced a function before, for another program, the innermost frames are those of
        the other program. So frames of this program come first.
        """
        here = (frame for frame in made.frames if (frame.file_name, frame.line_num) in self._lines)
        return origin_in(here)[0] or origin_in(made.frames)[0]

    def scopes(self, made: Operation) -> tuple[str, ...]:
        """Returns the longest sequence of this program's scopes whose words all occur, in order, in
        the names around an operation."""
        words = _split_path(made.path)
        among = (scopes for scopes, own in self._scopes.items() if _is_among(own, words))
        return max(among, key=len, default=())

    def describe(self, made: Operation | None) -> str:
        """Describes an operation: ``the backward pass of sin at model.py:12``."""
        if made is None:
            return ""
        origin, of = self.origin(made), "the backward pass of " if made.is_backward else ""
        return f"{of}{made.name}" + (f" at {origin.place}" if origin else "")


def _split_path(path: str) -> list[str]:
    return [word for word in re.split(r"[/()]", path) if word]


def _is_among(words: Iterable[str], all_words: Sequence[str]) -> bool:
    """Whether `all_words` contains `words` in their order, maybe with others between."""
    rest = iter(all_words)
    return all(word in rest for word in words)
