"""Why a function is traced again: what differs between one call's signature and the next.

Each new signature (shapes, dtypes, weak types, static values, trees) costs a trace and a
compilation. A function that meets ever new ones is slow without a visible cause, so it is said.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from tracegrad.ir.occurrence import warn_where_called

# Warn at this many retraces with one cause, then at each doubling.
FIRST_WARNING = 8
_REMEMBERED = 64

_CURES = {
    "shape": "pad it to a few fixed sizes",
    "dtype": "convert it before the call",
    "weak type": "pass an array of a fixed dtype, not a Python number at some calls",
    "static value": "pass it as an array, if the program need not be compiled for its value",
    "tree": "pass the same structure every time",
}


class RetraceWarning(UserWarning):
    """One function is traced and compiled again and again."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a program was compiled for."""

    tree: Any
    types: tuple[tuple[str, str, str, bool], ...]  # path, dtype, shape, weak
    static: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, args: Mapping[str, Any], static: Mapping[str, Any]) -> Signature:
        leaves, tree = jax.tree_util.tree_flatten_with_path(dict(args))
        types = []
        for path, leaf in leaves:
            aval = jax.typeof(leaf)
            dtype = str(getattr(aval, "dtype", aval))
            shape = str(list(getattr(aval, "shape", ())))
            name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
            types.append((name, dtype, shape, bool(getattr(aval, "weak_type", False))))
        return cls(tree, tuple(types), tuple(sorted(static.items())))


@dataclass
class TraceHistory:
    """The signatures for which one function was traced; says when they are too many."""

    name: str
    seen: deque[Signature] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    causes: Counter[tuple[str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note(self, signature: Signature) -> None:
        """Records a trace; warns (`RetraceWarning`) if one cause comes again and again."""
        with self._lock:
            if signature in self.seen:
                return  # JAX traces again for its own reasons: another mesh, precision, ...
            changes = difference(self.seen[-1], signature) if self.seen else []
            self.seen.append(signature)
            self.causes.update((where, kind) for where, kind, _, _ in changes)
            loud = [c for c in changes if _is_due(self.causes[c[0], c[1]])]
        for where, kind, old, new in loud:
            self._warn(where, kind, old, new)

    def _warn(self, where: str, kind: str, old: str, new: str) -> None:
        count = self.causes[where, kind]
        message = (
            f"{self.name} was traced and compiled again {count} times because the {kind} of "
            f"{where} changed, the last time from {old} to {new}. Each time costs a compilation: "
            f"{_CURES[kind]}."
        )
        warn_where_called(message, RetraceWarning)


def _is_due(count: int) -> bool:
    return count >= FIRST_WARNING and count % FIRST_WARNING == 0 and (count & (count - 1)) == 0


def difference(old: Signature, new: Signature) -> list[tuple[str, str, str, str]]:
    """What changed: (argument, what of it, before, after), e.g. ``("x", "shape", "[8]", "[9]")``.

    What of it: ``"shape"``, ``"dtype"``, ``"weak type"``, ``"static value"`` or ``"tree"``.
    """
    changes = []
    for name, before, after in _paired(old.static, new.static):
        if before != after:
            changes.append((f"`{name}`", "static value", _short(before), _short(after)))
    if old.tree != new.tree:
        return [*changes, ("the arguments", "tree", _short(old.tree), _short(new.tree))]
    for (name, dtype, shape, weak), (_, dtype2, shape2, weak2) in zip(
        old.types, new.types, strict=True
    ):
        if shape != shape2:
            changes.append((f"`{name}`", "shape", shape, shape2))
        if dtype != dtype2:
            changes.append((f"`{name}`", "dtype", dtype, dtype2))
        elif weak != weak2:
            kinds = ("an array's", "a Python number's")
            changes.append((f"`{name}`", "weak type", kinds[weak], kinds[weak2]))
    return changes


def _paired(
    old: Sequence[tuple[str, Any]], new: Sequence[tuple[str, Any]]
) -> list[tuple[str, Any, Any]]:
    before, after = dict(old), dict(new)
    return [(name, before.get(name), after.get(name)) for name in {**before, **after}]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
