"""Runs each call of a module of equinox or flax.nnx in a named scope, as flax.linen does itself.

These frameworks tell JAX nothing about calls of modules (only equinox's own layers have scopes,
named by their classes). While a function is traced here, each call of a module is a named scope. If
another module calls the module, the scope is the path in the caller: ``blocks.0``. Otherwise the
scope is the class, numbered from the second module of the class on: ``Linear``, ``Linear_1``. So
``Model/blocks.0/attention`` selects a block, and names it in graphs and plans.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import jax

from tracegrad import _jax
from tracegrad.ir.paths import path_name

# Part of JAX's cache key, so that inner functions traced with scopes are not reused without.
_key = _jax.user_context()

# By the name of the framework: its class of modules, and prefixes of the Python modules whose
# classes only wrap transformed functions, and get no scope.
_FRAMEWORKS = {
    "equinox": ("Module", ("equinox._", "equinox.internal", "equinox.debug")),
    "flax.nnx": ("Module", ("flax.nnx.transforms", "flax.nnx.bridge")),
}


class _ModuleCall(NamedTuple):
    """A running call of a module: its path in the outermost module, and the paths of all modules
    in the outermost module, by id."""

    module: Any
    path: str
    paths: dict[int, str]


class _ScopedTracing(threading.local):
    calls: list[_ModuleCall] | None = None  # outermost first; None if nothing is being traced
    # By the id of an outermost module: a weak reference to it, and the paths of its modules.
    paths: dict[int, tuple[Any, dict[int, str]]]
    # By class, calling module and transformation: the modules called there, weakly.
    alike: dict[Any, list[Any]]


_tracing = _ScopedTracing()


def call_scopes() -> AbstractContextManager[None]:
    """A block in which this thread's calls of modules are named scopes."""
    bases = _module_classes()
    return _scopes(bases) if bases and _tracing.calls is None else nullcontext()


@contextmanager
def _scopes(bases: tuple[type, ...]) -> Iterator[None]:
    _tracing.calls, _tracing.paths, _tracing.alike = [], {}, {}
    try:
        with _calls.in_place(_replacements(bases)), _key(call_scopes):
            yield
    finally:
        _tracing.calls, _tracing.paths, _tracing.alike = None, {}, {}


def _module_classes() -> tuple[type, ...]:
    """Of the imported frameworks."""
    found = ((sys.modules.get(name), base) for name, (base, _) in _FRAMEWORKS.items())
    return tuple(getattr(module, base) for module, base in found if hasattr(module, base))


def _in_scope(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the `__call__` of a class: a call runs in a named scope if the thread is tracing."""

    @functools.wraps(call, updated=())
    def scoped(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        calls = _tracing.calls
        # By the second condition, `super().__call__` gets no scope of its own.
        if calls is None or (calls and calls[-1].module is self):
            return call(self, *args, **kwargs)
        name, begun = _begin(calls, self)
        calls.append(begun)
        try:
            with jax.named_scope(name):
                return call(self, *args, **kwargs)
        finally:
            calls.pop()

    return scoped


def _begin(calls: list[_ModuleCall], module: Any) -> tuple[str, _ModuleCall]:
    """Returns the name of the scope for a call of a module, and the call."""
    for outer in reversed(calls):
        path = outer.paths.get(id(module))
        if path is not None:
            around = calls[-1].path + "." if calls[-1].paths is outer.paths else "."
            return path.removeprefix(around), _ModuleCall(module, path, outer.paths)
    if calls:
        within = _paths_in_copy(calls[-1].module)
        if id(module) in within:
            return within[id(module)], _ModuleCall(module, within[id(module)], within)
    ref = weakref.ref(module)
    known = _tracing.paths.get(id(module))
    if known is None or known[0]() is not module:
        known = _tracing.paths[id(module)] = ref, _paths_in(module)
    # Transformations pass copies of modules to their functions: each transformation counts anew.
    name, around = type(module).__name__, "/".join(call.path for call in calls)
    place = name, around, weakref.ref(_jax.current_trace(None))
    alike = _tracing.alike.setdefault(place, [])
    number = next((i for i, other in enumerate(alike) if other() is module), len(alike))
    if number == len(alike):
        alike.append(ref)
    return f"{name}_{number}" if number else name, _ModuleCall(module, "", known[1])


def _paths_in_copy(called: Any) -> dict[int, str]:
    """The paths of modules in a copy of the calling module: a transformation of a method, such as
    `nnx.remat`, passes a copy to the method. {} if the caller is no copy."""
    caller = sys._getframe(3)
    first = caller.f_code.co_varnames[: caller.f_code.co_argcount][:1]
    copy = caller.f_locals.get(*first) if first else None
    if type(copy) is not type(called) or copy is called:
        return {}
    return _paths_in(copy)


def _paths_in(root: Any) -> dict[int, str]:
    paths: dict[int, str] = {}
    _add_paths(root, "", root, _module_classes(), paths)
    return paths


# A recursive closure would be a reference cycle, which holds the modules until the garbage
# collector runs.
def _add_paths(
    module: Any, prefix: str, root: Any, bases: tuple[type, ...], paths: dict[int, str]
) -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        module, is_leaf=lambda node: node is not module and isinstance(node, bases)
    )
    for path, leaf in leaves:
        if isinstance(leaf, bases) and id(leaf) not in paths and leaf is not root:
            paths[id(leaf)] = path_name(path, prefix)
            _add_paths(leaf, paths[id(leaf)], root, bases, paths)


_calls = _jax.Replacement()


def _replacements(bases: tuple[type, ...]) -> Iterator[tuple[type, str, Any]]:
    """Yields the `__call__` of each class of modules that defines `__call__`."""
    for kind in _classes(bases):
        call = vars(kind).get("__call__")
        if callable(call) and not isinstance(call, staticmethod | classmethod):
            yield kind, "__call__", _in_scope


def _classes(bases: tuple[type, ...]) -> Iterator[type]:
    """Yields all classes of modules, without the wrappers of transformed functions."""
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
