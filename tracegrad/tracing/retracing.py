"""Warns if a function is traced again and again, and says what differs between the calls.

Each call with new types (shapes, dtypes, weak types, static values, trees) costs a trace and a
compilation. If the types keep changing, the function is slow without a visible cause.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from tracegrad.ir import Graph
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.ir.wording import shortened
from tracegrad.tracing.arguments import PackedCall
from tracegrad.variables.leaves import leaves_with_paths
from tracegrad.variables.modules import is_module_or_variable, unflatten_modules
from tracegrad.variables.nnx_objects import attribute_texts, differences, is_module
from tracegrad.variables.packed import Packed
from tracegrad.variables.paths import path_name
from tracegrad.variables.statics import Static, VariableNode, is_variable, node_of_variable
from tracegrad.variables.trees import finding_variables
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
    "tree": "pass the same structure every time",
    "structure": "make the module once, before the calls, and pass the same module every time",
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


class CallTypes(NamedTuple):
    """The types and the static values of the arguments for which a function was compiled."""

    tree: Any
    # path, dtype or Variable, shape, whether the type is weak
    types: tuple[tuple[str, Any, tuple[Any, ...], bool], ...]
    static: tuple[tuple[str, Any], ...]
    modules: tuple[tuple[str, Any], ...] = ()  # the structures of arguments with flax.nnx modules

    @classmethod
    def of(cls, call: PackedCall, graph: Graph) -> CallTypes:
        """`graph`: the trace of the call."""
        arguments, static = call.by_name()
        arrays = list(zip(graph.hints, graph.in_avals))[: graph.in_tree.num_leaves]
        types: list[tuple[str, Any, tuple[Any, ...], bool]]
        types = [(path, *_type_of(aval)) for path, aval in arrays]
        values = dict(static)
        trees: dict[str, Any] = {}
        modules = []
        for argument, packed in arguments:
            tree = packed.argument() if isinstance(packed, Packed) else packed
            if isinstance(packed, Packed) and packed.has_non_arrays:
                own = set(map(id, packed.arrays))
                for path, leaf in leaves_with_paths(tree):
                    if isinstance(leaf, Variable):
                        types.append((path_name(path, argument), node_of_variable(leaf), (), False))
                    elif id(leaf) not in own:
                        values[path_name(path, argument)] = Static(leaf)
            trees[argument] = tree
            if isinstance(packed, Packed):
                nodes = jax.tree.leaves(tree, is_leaf=is_module_or_variable)
                if any(map(is_module, nodes)):
                    modules.append((argument, packed.structure))
        ordered = sorted(values.items(), key=operator.itemgetter(0))
        structure = jax.tree.structure(trees, is_leaf=is_variable)
        return cls(structure, tuple(types), tuple(ordered), tuple(modules))


def _type_of(aval: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Returns (dtype, shape, whether the type is weak)."""
    dtype, shape = getattr(aval, "dtype", aval), getattr(aval, "shape", ())
    return dtype, shape, bool(getattr(aval, "weak_type", False))


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
    ``"Variable"``, ``"tree"``, and ``"structure"`` for the attributes of a module besides arrays.
    """
    changes: list[tuple[str, str, str, str]] = []
    arrays_before, arrays_after = ({entry[0]: entry for entry in s.types} for s in (old, new))
    for name, before, after in _pair(old.static, new.static):
        if before != after:
            was, is_now = arrays_before.pop(name, None), arrays_after.pop(name, None)
            old_text = shortened(repr(before)) if was is None else _text_of_type(*was[1:])
            new_text = shortened(repr(after)) if is_now is None else _text_of_type(*is_now[1:])
            is_object = isinstance(after, Static) and after.is_known_by_identity
            kind = "static object" if is_object else "static value"
            changes.append((f"`{name}`", kind, old_text, new_text))
    if old.tree != new.tree:
        if changed := _changes_in_modules(old.modules, new.modules):
            return [*changes, *changed]
        return [
            *changes,
            ("the arguments", "tree", shortened(repr(old.tree)), shortened(repr(new.tree))),
        ]
    for name, (_, dtype, shape, weak) in arrays_before.items():
        _, dtype2, shape2, weak2 = arrays_after[name]
        if isinstance(dtype, VariableNode) or isinstance(dtype2, VariableNode):
            if dtype is not dtype2:
                texts = _text_of_type(dtype, shape), _text_of_type(dtype2, shape2)
                changes.append((f"`{name}`", "Variable", *texts))
            continue
        if shape != shape2:
            changes.append((f"`{name}`", "shape", str(list(shape)), str(list(shape2))))
        if dtype != dtype2:
            changes.append((f"`{name}`", "dtype", str(dtype), str(dtype2)))
        elif weak != weak2:
            kinds = ("an array's", "a Python number's")
            changes.append((f"`{name}`", "weak type", kinds[weak], kinds[weak2]))
    return changes


def _text_of_type(dtype: Any, shape: tuple[Any, ...], weak: bool = False) -> str:
    sizes = "" if isinstance(dtype, VariableNode) else str(list(shape))
    return f"{'weak ' if weak else ''}{dtype}{sizes}"


def _changes_in_modules(
    old: Sequence[tuple[str, Any]], new: Sequence[tuple[str, Any]]
) -> list[tuple[str, str, str, str]]:
    """The changes in the structures of nnx modules."""
    if old == new or not old or not new:
        return []
    found = differences(_describe_modules(old), _describe_modules(new))
    return [(where, "structure", before, now) for where, before, now in found]


def _describe_modules(arguments: Sequence[tuple[str, Any]]) -> dict[str, str]:
    """Describes, by path, the classes and static attributes of the modules in arguments."""
    modules, names = [], []
    for argument, structure in arguments:
        tree = unflatten_modules(jax.tree.unflatten(structure, [...] * structure.num_leaves))
        nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_module)
        for path, node in nodes:
            if is_module(node):
                modules.append(node)
                names.append(path_name(path, argument))
    with finding_variables([]):  # so that flattening does not read the Variables in them
        return attribute_texts(modules, names)


def _pair(
    old: Sequence[tuple[str, Any]], new: Sequence[tuple[str, Any]]
) -> list[tuple[str, Any, Any]]:
    before, after = dict(old), dict(new)
    return [(name, before.get(name), after.get(name)) for name in {**before, **after}]
