"""Selects parameters of a function by their paths (`match.param`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal


@dataclass(frozen=True, repr=False)
class Parameters:
    """A selection of a function's parameters by path, made by `match.param` or with & | ~.

    Attributes:
      operator: the operator that is applied to `parts`; "" if `parts` are glob patterns.
      parts: `Parameters`, the operands of `operator`; glob patterns if `operator` is "".
    """

    operator: Literal["", "&", "|", "~"]
    parts: tuple[Any, ...]

    def fits(self, *paths: str) -> bool:
        """Whether the selection includes the parameter that has these paths. Each path begins with
        the name of an argument."""
        if not self.operator:
            return any(_matches(glob, path) for glob in self.parts for path in paths)
        found = [part.fits(*paths) for part in self.parts]
        if self.operator == "~":
            return not found[0]
        return all(found) if self.operator == "&" else any(found)

    @property
    def patterns(self) -> tuple[str, ...]:
        if not self.operator:
            return self.parts
        return tuple(glob for part in self.parts for glob in part.patterns)

    def __and__(self, other: Any) -> Parameters:
        return Parameters("&", (self, _require_parameters(other)))

    def __or__(self, other: Any) -> Parameters:
        return Parameters("|", (self, _require_parameters(other)))

    def __invert__(self) -> Parameters:
        return Parameters("~", (self,))

    def __repr__(self) -> str:
        if not self.operator:
            return f"match.param({', '.join(map(repr, self.parts))})"
        if self.operator == "~":
            return f"~{self.parts[0]!r}"
        return f"({self.parts[0]!r} {self.operator} {self.parts[1]!r})"


def _require_parameters(other: Any) -> Parameters:
    if not isinstance(other, Parameters):
        is_selector = hasattr(other, "select_in")  # of operations
        raise TypeError(NOT_COMBINED if is_selector else _cannot_combine_message(other))
    return other


def _cannot_combine_message(other: object) -> str:
    return f"match.param can be combined with another match.param only, not with {other!r}"


NOT_COMBINED = (
    "match.param selects parameters, and the other selectors select operations: the two cannot be "
    "combined. Give one rule for the parameters, and another for the operations"
)


def _matches(glob: str, path: str) -> bool:
    """Whether `glob` matches a path or a prefix of it, with or without the argument's name."""
    return any(name == glob or fnmatchcase(name, glob) for name in _path_prefixes(path))


def _path_prefixes(path: str) -> Iterator[str]:
    """Yields a path and its prefixes, with and then without the argument's name. For ``m.a.b``:
    ``m.a.b``, ``m.a``, ``m``, ``a.b``, ``a``."""
    for name in (path, path.partition(".")[2]):
        while name:
            yield name
            name = name.rpartition(".")[0]
