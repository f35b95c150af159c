"""Which parameters of a function are meant: `match.param`, by their paths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal


@dataclass(frozen=True, repr=False)
class Parameters:
    """Parameters of a function, by their paths; made by `match.param`, combined with & | ~.

    Attributes:
      operator: how the parts are combined; "" for globs.
      parts: globs, or other selections of parameters.
    """

    operator: Literal["", "&", "|", "~"]
    parts: tuple[Any, ...]

    def fits(self, *paths: str) -> bool:
        """Whether a parameter is among them that is known by these paths, an argument's name first
        in each."""
        if not self.operator:
            return any(_fits(glob, path) for glob in self.parts for path in paths)
        found = [part.fits(*paths) for part in self.parts]
        if self.operator == "~":
            return not found[0]
        return all(found) if self.operator == "&" else any(found)

    @property
    def patterns(self) -> tuple[str, ...]:
        """All globs in it."""
        if not self.operator:
            return self.parts
        return tuple(glob for part in self.parts for glob in part.patterns)

    def __and__(self, other: Any) -> Parameters:
        return Parameters("&", (self, _parameters(other)))

    def __or__(self, other: Any) -> Parameters:
        return Parameters("|", (self, _parameters(other)))

    def __invert__(self) -> Parameters:
        return Parameters("~", (self,))

    def __repr__(self) -> str:
        if not self.operator:
            return f"match.param({', '.join(map(repr, self.parts))})"
        if self.operator == "~":
            return f"~{self.parts[0]!r}"
        return f"({self.parts[0]!r} {self.operator} {self.parts[1]!r})"


def _parameters(other: Any) -> Parameters:
    if not isinstance(other, Parameters):
        raise TypeError(NOT_COMBINED if hasattr(other, "look") else _no_parameters(other))
    return other


def _no_parameters(other: object) -> str:
    return f"match.param is combined with another match.param, not with {other!r}"


NOT_COMBINED = (
    "match.param says which parameters, the other selectors which operations: the two are not "
    "combined. Give one rule for the parameters, and another for the operations"
)


def _fits(glob: str, path: str) -> bool:
    """Whether a glob fits a path or what holds it, with the argument's name or without."""
    return any(name == glob or fnmatchcase(name, glob) for name in _holders(path))


def _holders(path: str) -> Iterator[str]:
    """A path and what holds the leaf: ``m.a.b``, ``m.a``, ``m``; and without the argument's name:
    ``a.b``, ``a``."""
    for name in (path, path.partition(".")[2]):
        while name:
            yield name
            name = name.rpartition(".")[0]
