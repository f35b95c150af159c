"""Warns if a function is traced again and again, and says what differs between the calls.

Each call with new types (shapes, dtypes, weak types, static values, trees) costs a trace and a
compilation. If the types keep changing, the function is slow without a visible cause.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from tracegrad.ir import Graph
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.ir.paths import path_name
from tracegrad.ir.wording import shortened
from tracegrad.tracing.arguments import PackedCall
from tracegrad.tracing.leaves import leaves_with_paths
from tracegrad.tracing.packed import Packed
from tracegrad.tracing.statics import Static
from tracegrad.variables.trees import VariableNode, is_variable, node_of_variable
from tracegrad.variables.variable import Variable

# Warn at this many retraces with one cause, then at each doubling.
FIRST_WARNING = 8
_REMEMBERED = 64

_CURES = {
    "shape": "pad it to a few fixed sizes",
    "dtype": "convert it before the call",
    "weak type": "pass an array of a fixed dtype, not a Python number at some calls",
    "static value": "pass it as an array, if the program need not be compiled for its value",
    "static object": "make it once and pass the same object, or give its class an __eq__ and a "
    "__hash__, or, if it holds arrays, register it with jax.tree_util.register_dataclass",
    "Variable": "pass its `.value`, unless the function is to watch or to assign it",
    "tree": "pass the same structure every time, with modules and optimisers that were made once",
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


class ArrayType(NamedTuple):
    dtype: Any
    shape: tuple[int, ...]
    is_weak: bool

    def __str__(self) -> str:
        return f"{'weak ' if self.is_weak else ''}{self.dtype}{list(self.shape)}"


class CallTypes(NamedTuple):
    """The types and the static values of the arguments for which a function was compiled.

    Attributes:
      trees: by argument that is not static, its structure.
      leaves: by path, an `ArrayType`, a `VariableNode` or a static value.
    """

    trees: dict[str, Any]
    leaves: dict[str, Any]

    @classmethod
    def of(cls, call: PackedCall, graph: Graph) -> CallTypes:
        """`graph`: the trace of the call."""
        arguments, static = call.by_name
        leaves = dict(static)
        for hint, aval in zip(graph.hints, graph.in_avals[: graph.in_tree.num_leaves]):
            dtype, shape = getattr(aval, "dtype", aval), getattr(aval, "shape", ())
            leaves[hint] = ArrayType(dtype, shape, bool(getattr(aval, "weak_type", False)))
        trees = {}
        for name, argument in arguments:
            is_packed = isinstance(argument, Packed)
            tree = argument.argument() if is_packed else argument
            trees[name] = jax.tree.structure(tree, is_leaf=is_variable)
            own = set(map(id, argument.arrays)) if is_packed else set()
            is_mixed = is_packed and argument.has_non_arrays
            for path, leaf in leaves_with_paths(tree) if is_mixed else ():
                if isinstance(leaf, Variable):
                    leaves[path_name(path, name)] = node_of_variable(leaf)
                elif id(leaf) not in own:
                    leaves[path_name(path, name)] = Static(leaf)
        return cls(trees, leaves)


@dataclass
class TraceHistory:
    """The latest types of calls for which one function was traced."""

    name: str
    _calls: deque[CallTypes] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _causes: Counter[tuple[str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note(self, call: CallTypes) -> None:
        """Records a trace; warns (`RetraceWarning`) if one cause recurs."""
        with self._lock:
            if call in self._calls:
                return  # JAX traces again for its own reasons: another mesh, precision, ...
            changes = changes_between(self._calls[-1], call) if self._calls else []
            self._calls.append(call)
            self._causes.update((where, kind) for where, kind, _, _ in changes)
            loud = [c for c in changes if _is_due(self._causes[c[0], c[1]])]
        for where, kind, old, new in loud:
            self._warn(where, kind, old, new)

    def _warn(self, where: str, kind: str, old: str, new: str) -> None:
        count = self._causes[where, kind]
        message = (
            f"{self.name} was traced and compiled again {count} times because the {kind} of "
            f"{where} changed, the last time from {old} to {new}. Each time costs a compilation: "
            f"{_CURES[kind]}."
        )
        warn_where_called(message, RetraceWarning)


def _is_due(count: int) -> bool:
    return count >= FIRST_WARNING and count % FIRST_WARNING == 0 and (count & (count - 1)) == 0


def changes_between(old: CallTypes, new: CallTypes) -> list[tuple[str, str, str, str]]:
    """Returns the changes as (argument, kind, before, after): ``("x", "shape", "[8]", "[9]")``.

    The kinds: ``"shape"``, ``"dtype"``, ``"weak type"``, ``"static value"``, ``"static object"``,
    ``"Variable"``, ``"tree"``.
    """
    changes: list[tuple[str, str, str, str]] = []
    for path in {**old.leaves, **new.leaves}:
        before, after = old.leaves.get(path), new.leaves.get(path)
        is_static = not all(each is None or _is_type(each) for each in (before, after))
        if before != after and (is_static or old.trees == new.trees):
            found = _static_change(before, after) if is_static else _type_changes(before, after)
            changes += [(f"`{path}`", *change) for change in found]
    absent = jax.tree.structure(None)
    for name in {**old.trees, **new.trees}:
        trees = old.trees.get(name, absent), new.trees.get(name, absent)
        if trees[0] != trees[1]:
            changes.append((f"`{name}`", "tree", *_first_difference(*trees)))
    return changes


def _is_type(leaf: Any) -> bool:
    """Not a static value."""
    return isinstance(leaf, ArrayType | VariableNode)


def _static_change(before: Any, after: Any) -> list[tuple[str, str, str]]:
    is_object = isinstance(after, Static) and after.is_known_by_identity
    texts = [str(each) if _is_type(each) else shortened(repr(each)) for each in (before, after)]
    return [("static object" if is_object else "static value", texts[0], texts[1])]


def _type_changes(before: Any, after: Any) -> list[tuple[str, str, str]]:
    """Returns (kind, before, after) for each difference of the types of two leaves."""
    if isinstance(before, VariableNode) or isinstance(after, VariableNode):
        return [("Variable", str(before), str(after))]
    changes = []
    if before.shape != after.shape:
        changes.append(("shape", str(list(before.shape)), str(list(after.shape))))
    if before.dtype != after.dtype:
        changes.append(("dtype", str(before.dtype), str(after.dtype)))
    elif before.is_weak != after.is_weak:
        kinds = ("an array's", "a Python number's")
        changes.append(("weak type", kinds[before.is_weak], kinds[after.is_weak]))
    return changes


def _first_difference(old: Any, new: Any) -> tuple[str, str]:
    """Describes the first nodes in which two structures differ."""
    (kind, data), (other_kind, other_data) = map(_kind_and_data, (old, new))
    if (kind, data) == (other_kind, other_data):
        pairs = zip(old.children(), new.children(), strict=True)
        differences = (_first_difference(*pair) for pair in pairs if pair[0] != pair[1])
        return next(differences, (kind, other_kind))  # by default: two classes of one name
    if kind != other_kind:
        return kind, other_kind
    while type(data) is type(other_data) and type(data) in (tuple, list):
        parts = itertools.zip_longest(data, other_data)
        data, other_data = next((pair for pair in parts if pair[0] != pair[1]), (None, None))
    texts = ("nothing" if each is None else repr(each) for each in (data, other_data))
    before, after = (shortened(f"{kind} with {text}") for text in texts)
    return before, after


def _kind_and_data(structure: Any) -> tuple[str, Any]:
    """The class of the root of a structure, and what the root holds besides its children."""
    if structure.node_data() is None:
        return "an array", None
    kind, data = structure.node_data()
    return kind.__name__, (data, len(structure.children()))
