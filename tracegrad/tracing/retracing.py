"""For what a function was traced, and why again: what differs between one signature and the next.

Each new signature (shapes, dtypes, weak types, static values, trees) costs a trace and a
compilation. A function that meets ever new ones is slow without a visible cause, so it is said.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import jax

from tracegrad import _jax
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.ir.wording import shortened
from tracegrad.variables.leaves import named_leaves
from tracegrad.variables.modules import Held, Structure, is_whole
from tracegrad.variables.nnx_objects import differences
from tracegrad.variables.statics import Given, Static, is_structure

# Warn at this many retraces with one cause, then at each doubling.
FIRST_WARNING = 8
_REMEMBERED = 64
_LEAVES = 8  # of one argument that are listed

_CURES = {
    "shape": "pad it to a few fixed sizes",
    "dtype": "convert it before the call",
    "weak type": "pass an array of a fixed dtype, not a Python number at some calls",
    "static value": "pass it as an array, if the program need not be compiled for its value",
    "static object": "make it once and pass the same, or give its class an __eq__ and a __hash__, "
    "or, if it holds arrays, register it with jax.tree_util.register_dataclass",
    "Variable": "pass its `.value`, unless the function is to watch or to assign it",
    "tree": "pass the same structure every time",
    "structure": "make it once, before the calls, and pass the same every time",
}


class RetraceWarning(UserWarning):
    """One function is traced and compiled again and again.

    >>> import warnings
    >>> import jax.numpy as jnp, tracegrad as tg
    >>> f = tg.trace(lambda x: x)
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     for size in range(1, 12):
    ...         _ = f(jnp.ones(size))
    >>> {warning.category.__name__ for warning in caught}
    {'RetraceWarning'}
    """


class Signature(NamedTuple):
    """What a program was compiled for."""

    tree: Any
    types: tuple[tuple[str, str | Given, str, bool], ...]  # path, dtype or Variable, shape, weak
    static: tuple[tuple[str, Any], ...]
    modules: tuple[tuple[str, Structure], ...] = ()  # those of flax.nnx, by path
    outside: tuple[tuple[str, Structure], ...] = ()  # those that the function closes over

    @classmethod
    def of(
        cls, args: Mapping[str, Any], static: Mapping[str, Any], outside: Mapping[str, Structure]
    ) -> Signature:
        tree = jax.tree.structure(dict(args), is_leaf=is_structure)
        types: list[tuple[str, str | Given, str, bool]] = []
        values = dict(static)
        for name, leaf in named_leaves(args, is_structure):
            if isinstance(leaf, Given):
                types.append((name, leaf, "", False))
                continue
            if isinstance(leaf, Static):
                values[name] = leaf
                continue
            aval = _jax.type_of(leaf) or leaf  # a part of a reference has a shape and a dtype
            dtype = str(getattr(aval, "dtype", aval))
            shape = str(list(getattr(aval, "shape", ())))
            types.append((name, dtype, shape, bool(getattr(aval, "weak_type", False))))
        ordered = sorted(values.items(), key=operator.itemgetter(0))
        return cls(tree, tuple(types), tuple(ordered), _modules(args), tuple(outside.items()))

    def __str__(self) -> str:
        parts: list[str] = []
        for argument, arrays in itertools.groupby(self.types, lambda array: _argument(array[0])):
            each = [f"{array[0]}: {_array_text(*array)}" for array in arrays]
            parts += each if len(each) <= _LEAVES else [f"{argument}: {len(each)} leaves"]
        parts += [f"{name}={shortened(repr(value))} (static)" for name, value in self.static]
        return ", ".join(parts) or "no arguments"


def _argument(path: str) -> str:
    """The argument in which a leaf is: of ``params.layers[0]`` it is ``params``."""
    return path.partition(".")[0].partition("[")[0]


def _modules(args: Mapping[str, Any]) -> tuple[tuple[str, Structure], ...]:
    is_leaf = is_whole()
    if is_leaf is None:
        return ()
    leaves = named_leaves(args, is_leaf)
    return tuple((name, leaf.structure) for name, leaf in leaves if type(leaf) is Held)


class TracedSignature(NamedTuple):
    """One signature for which a function was traced.

    Attributes:
      arguments: their types by path, and static values: ``x: float32[8], n=3 (static)``.
      first, last: when it was traced for the first and for the last time.
      times: how often it was traced. More than once: the cache was cleared, or JAX had reasons of
        its own (another mesh, precision, transformation, ...).
      reason: what differed from the signature before: ``the shape of `x` changed from [8] to [9]``.
    """

    arguments: str
    first: datetime
    last: datetime
    times: int
    reason: str

    def __str__(self) -> str:
        again = f", {self.times} times, the last at {self.last:%H:%M:%S}" if self.times > 1 else ""
        return f"{self.first:%H:%M:%S}  {self.arguments}{again}\n    {self.reason}"


@dataclass(frozen=True)
class CacheInfo:
    """For what a traced function was traced and compiled; see `TracedFunction.cache_info`.

    Attributes:
      name: the function's.
      count: how many different signatures were met.
      signatures: the last of them (up to 64), in the order in which they were met.
      causes: how often each argument had a part in a new signature: (argument, what of it) → times.

    It prints as a list with the reason for each entry.
    """

    name: str
    count: int
    signatures: tuple[TracedSignature, ...]
    causes: Mapping[tuple[str, str], int]

    def __str__(self) -> str:
        if not self.count:
            return f"{self.name} was not traced yet"
        plural = "" if self.count == 1 else "s"
        left = self.count - len(self.signatures)
        lines = [f"{self.name} was traced for {self.count} signature{plural}"]
        if left:
            lines.append(f"  ... {left} before these")
        lines += [f"  {number}. {s}" for number, s in enumerate(self.signatures, left + 1)]
        for (where, kind), times in self.causes.items():
            if times > 1:
                lines.append(f"  {times} times the {kind} of {where} changed: {_CURES[kind]}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


@dataclass
class _Entry:
    signature: Signature
    changes: list[tuple[str, str, str, str]]
    first: datetime
    last: datetime
    times: int = 1


@dataclass
class TraceHistory:
    """The signatures for which one function was traced; says when they are too many."""

    name: str
    entries: deque[_Entry] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    causes: Counter[tuple[str, str]] = field(default_factory=Counter)
    count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note(self, signature: Signature) -> None:
        """Records a trace; warns (`RetraceWarning`) if one cause comes again and again."""
        now = datetime.now()
        with self._lock:
            for entry in self.entries:
                if entry.signature == signature:
                    entry.last, entry.times = now, entry.times + 1
                    return  # JAX traces again for its own reasons: another mesh, precision, ...
            before = self.entries[-1].signature if self.entries else None
            changes = [] if before is None else difference(before, signature)
            self.entries.append(_Entry(signature, changes, now, now))
            self.count += 1
            self.causes.update((where, kind) for where, kind, _, _ in changes)
            loud = [c for c in changes if _is_due(self.causes[c[0], c[1]])]
        for where, kind, old, new in loud:
            self._warn(where, kind, old, new)

    def info(self) -> CacheInfo:
        """What was recorded, for people."""
        with self._lock:
            signatures = tuple(
                TracedSignature(
                    str(entry.signature),
                    entry.first,
                    entry.last,
                    entry.times,
                    _reason(
                        entry.changes, is_first=position == 0 and len(self.entries) == self.count
                    ),
                )
                for position, entry in enumerate(self.entries)
            )
            return CacheInfo(self.name, self.count, signatures, dict(self.causes.most_common()))

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

    What of it: ``"shape"``, ``"dtype"``, ``"weak type"``, ``"static value"``, ``"static object"``,
    ``"Variable"`` or ``"tree"``; of what a module consists of besides arrays, ``"structure"``.
    """
    changes = _in_modules(old.outside, new.outside)
    arrays_before, arrays_after = ({entry[0]: entry for entry in s.types} for s in (old, new))
    for name, before, after in _paired(old.static, new.static):
        if before != after:
            was, is_now = arrays_before.pop(name, None), arrays_after.pop(name, None)
            old_text = shortened(repr(before)) if was is None else _array_text(*was)
            new_text = shortened(repr(after)) if is_now is None else _array_text(*is_now)
            is_object = isinstance(after, Static) and after.is_known_by_identity
            kind = "static object" if is_object else "static value"
            changes.append((f"`{name}`", kind, old_text, new_text))
    if old.tree != new.tree:
        if changed := _in_modules(old.modules, new.modules):
            return [*changes, *changed]
        return [
            *changes,
            ("the arguments", "tree", shortened(repr(old.tree)), shortened(repr(new.tree))),
        ]
    for (name, dtype, shape, weak), (_, dtype2, shape2, weak2) in zip(
        arrays_before.values(), arrays_after.values(), strict=True
    ):
        if isinstance(dtype, Given) or isinstance(dtype2, Given):
            if dtype is not dtype2:
                changes.append((f"`{name}`", "Variable", f"{dtype}{shape}", f"{dtype2}{shape2}"))
            continue
        if shape != shape2:
            changes.append((f"`{name}`", "shape", shape, shape2))
        if dtype != dtype2:
            changes.append((f"`{name}`", "dtype", dtype, dtype2))
        elif weak != weak2:
            kinds = ("an array's", "a Python number's")
            changes.append((f"`{name}`", "weak type", kinds[weak], kinds[weak2]))
    return changes


def _array_text(name: str, dtype: str | Given, shape: str, weak: bool) -> str:
    return f"{'weak ' if weak else ''}{dtype}{shape}"


def _in_modules(
    old: Sequence[tuple[str, Structure]], new: Sequence[tuple[str, Structure]]
) -> list[tuple[str, str, str, str]]:
    """What changed in modules of flax.nnx."""
    if old == new or not old or not new:
        return []
    before, after = (of[0][1].describe([name for name, _ in of]) for of in (old, new))
    found = differences(before, after)
    return [(where, "structure", before, now) for where, before, now in found]


def _reason(changes: Sequence[tuple[str, str, str, str]], *, is_first: bool) -> str:
    if is_first:
        return "the first"
    told = [
        f"the {kind} of {where} changed from {old} to {new}" for where, kind, old, new in changes
    ]
    return "; ".join(told) or "the signature differs"


def _paired(
    old: Sequence[tuple[str, Any]], new: Sequence[tuple[str, Any]]
) -> list[tuple[str, Any, Any]]:
    before, after = dict(old), dict(new)
    return [(name, before.get(name), after.get(name)) for name in {**before, **after}]
