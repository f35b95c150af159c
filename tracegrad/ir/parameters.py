"""Selects parameters of a function by their paths (`match.param`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, repr=False)
class Parameters:
    """A selection of a function's parameters, made by `match.param`: glob patterns for paths."""

    patterns: tuple[str, ...]

    def fits(self, *paths: str) -> bool:
        """Whether the selection includes the parameter that has these paths. Each path begins with
        the name of an argument."""
        return any(_matches(glob, path) for glob in self.patterns for path in paths)

    def __repr__(self) -> str:
        return f"match.param({', '.join(map(repr, self.patterns))})"


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
