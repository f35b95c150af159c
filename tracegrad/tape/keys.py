"""When two recorded operations compute the same function."""

from __future__ import annotations

from typing import Any


def params_key(params: dict[str, Any]) -> Any:
    """A key equal for parameters that mean the same function; programs count by identity."""
    items = tuple(sorted(params.items(), key=lambda item: item[0]))
    try:
        hash(items)
    except TypeError:
        return _ById(items)
    return items


class _ById:
    """Unhashable parameters are told apart by their identity, and held so that it stays theirs."""

    __slots__ = ("_items", "_key")

    def __init__(self, items: tuple[tuple[str, Any], ...]):
        self._items = items
        self._key = tuple((name, id(value)) for name, value in items)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self._key == other._key
