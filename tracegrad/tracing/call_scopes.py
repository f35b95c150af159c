"""Named scopes of models whose frameworks give none: where in its model each called module stands.

Modules of equinox and of flax.nnx are called without a word to JAX (only equinox's own layers have
the names of their classes). While a function is traced here, the call of a module is a named scope:
for one that is called by another, its path in that, ``blocks.0``; for any else its class, with a
number if it is another one than the first: ``Linear``, ``Linear_1``. So a block is selected, shown
and planned by ``Model/blocks.0/attention``, as in flax.linen.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from tracegrad import _jax

# What JAX keeps of inner functions is kept apart from what it keeps of them elsewhere.
_key = _jax.user_context()

# By the module that is imported, the class of modules there, and the parts of the framework whose
# classes are called to transform functions.
_FRAMEWORKS = {
    "equinox": ("Module", ("equinox._", "equinox.internal", "equinox.debug")),
    "flax.nnx": ("Module", ("flax.nnx.transforms", "flax.nnx.bridge")),
}


class _Call(NamedTuple):
    """A call of a module that has begun: its path in the outermost module, and by the identities of
    modules the paths of all in that."""

    module: Any
    path: str
    paths: dict[int, str]


class _Tracing(threading.local):
    calls: list[_Call] | None = None  # the outermost first; None where nothing is being traced
    paths: dict[int, tuple[Any, dict[int, str]]]  # of outermost modules, weakly, by identity
    # Those of one class that are called in one place, weakly: in a module, in a transformation.
    alike: dict[Any, list[Any]]


_tracing = _Tracing()


@contextmanager
def call_scopes() -> Iterator[None]:
    """A block in which calls of modules, on this thread, are named scopes."""
    bases = _bases()
    if not bases or _tracing.calls is not None:
        yield
        return
    _tracing.calls, _tracing.paths, _tracing.alike = [], {}, {}
    try:
        with _calls.in_place(_places(bases)), _key(call_scopes):
            yield
    finally:
        _tracing.calls, _tracing.paths, _tracing.alike = None, {}, {}


def _bases() -> tuple[type, ...]:
    """The classes of modules, of the frameworks that are imported."""
    found = ((sys.modules.get(name), base) for name, (base, _) in _FRAMEWORKS.items())
    return tuple(getattr(module, base) for module, base in found if hasattr(module, base))


def _scoped(call: Callable[..., Any]) -> Callable[..., Any]:
    """The `__call__` of a class, as a named scope where the thread is tracing."""

    @functools.wraps(call, updated=())
    def scoped(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        calls = _tracing.calls
        if calls is None or (calls and calls[-1].module is self):  # or it is `super().__call__`
            return call(self, *args, **kwargs)
        name, begun = _begin(calls, self)
        calls.append(begun)
        try:
            with jax.named_scope(name):
                return call(self, *args, **kwargs)
        finally:
            calls.pop()

    return scoped


def _begin(calls: list[_Call], module: Any) -> tuple[str, _Call]:
    """The name of a call's scope, and the call."""
    for outer in reversed(calls):
        path = outer.paths.get(id(module))
        if path is not None:
            around = calls[-1].path + "." if calls[-1].paths is outer.paths else "."
            return path.removeprefix(around), _Call(module, path, outer.paths)
    if calls:
        within = _paths_in_copy(calls[-1].module)
        if id(module) in within:
            return within[id(module)], _Call(module, within[id(module)], within)
    ref = weakref.ref(module)
    known = _tracing.paths.get(id(module))
    if known is None or known[0]() is not module:
        known = _tracing.paths[id(module)] = ref, _paths_in(module)
    # Transformations hand copies of modules to their functions, which are counted in each anew.
    name, around = type(module).__name__, "/".join(call.path for call in calls)
    place = name, around, weakref.ref(_jax.current_trace(None))
    alike = _tracing.alike.setdefault(place, [])
    number = next((i for i, other in enumerate(alike) if other() is module), len(alike))
    if number == len(alike):
        alike.append(ref)
    return f"{name}_{number}" if number else name, _Call(module, "", known[1])


def _paths_in_copy(called: Any) -> dict[int, str]:
    """The paths in that copy of a called module in whose method the next one is called: what a
    transformation of the method, as `nnx.remat`, hands to it in the place of the module."""
    caller = sys._getframe(3)
    first = caller.f_code.co_varnames[: caller.f_code.co_argcount][:1]
    copy = caller.f_locals.get(*first) if first else None
    if type(copy) is not type(called) or copy is called:
        return {}
    return _paths_in(copy)


def _paths_in(root: Any) -> dict[int, str]:
    paths: dict[int, str] = {}
    _add_paths(root, "", root, _bases(), paths)
    return paths


# No closure that calls itself: it would hold the modules until garbage is collected.
def _add_paths(
    module: Any, prefix: str, root: Any, bases: tuple[type, ...], paths: dict[int, str]
) -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        module, is_leaf=lambda node: node is not module and isinstance(node, bases)
    )
    for path, leaf in leaves:
        if isinstance(leaf, bases) and id(leaf) not in paths and leaf is not root:
            paths[id(leaf)] = prefix + jax.tree_util.keystr(path, simple=True, separator=".")
            _add_paths(leaf, paths[id(leaf)] + ".", root, bases, paths)


_calls = _jax.Replacement()


def _places(bases: tuple[type, ...]) -> Iterator[tuple[type, str, Any]]:
    """Where scoped calls go: into the classes of modules that define how they are called."""
    for kind in _kinds(bases):
        call = vars(kind).get("__call__")
        if callable(call) and not isinstance(call, staticmethod | classmethod):
            yield kind, "__call__", _scoped


def _kinds(bases: tuple[type, ...]) -> Iterator[type]:
    """All classes of modules, but for those by which a framework transforms functions."""
    apart = tuple(prefix for _, prefixes in _FRAMEWORKS.values() for prefix in prefixes)
    seen, waiting = set(bases), list(bases)
    while waiting:
        subclasses: list[type] = type.__subclasses__(waiting.pop())
        for kind in subclasses:
            if kind not in seen:
                seen.add(kind)
                waiting.append(kind)
                if not kind.__module__.startswith(apart):
                    yield kind
