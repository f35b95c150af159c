"""Turns a traced module into a function that takes the module before its arguments.

So the module's arrays are inputs of the program, as with `equinox.filter_jit`, and modules that
differ only in their arrays share one function: a model before and after a step, or two results of
`equinox.filter_grad` for one function. Each call of a module of flax.nnx reads its current arrays,
and changes them as under ``nnx.jit``. A method of such a module takes the module first, as in its
class.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax

from tracegrad._jax.caches import Cache
from tracegrad.tracing.arguments import CallPacker
from tracegrad.tracing.nnx_objects import is_module as is_module_of_nnx
from tracegrad.tracing.statics import is_equinox_module, is_known_by_identity


class ModuleFunction:
    """A function that takes a module and calls it.

    Caches keep this function, so it does not refer to the module.
    """

    def __init__(self, module: Any):
        inner = inspect.unwrap(module)
        self._inner: Callable[[], Any] = lambda: None
        with suppress(TypeError):
            self._inner = weakref.ref(type(module).__call__ if inner is module else inner)
        self.__name__ = getattr(module, "__name__", type(module).__name__)
        self.__qualname__ = getattr(module, "__qualname__", type(module).__qualname__)
        self.__doc__ = module.__doc__
        self.__module__ = module.__module__
        with suppress(TypeError, ValueError):
            # Before Python 3.12, the signature of an object with a static `__call__` lacks a
            # parameter.
            call = inspect.getattr_static(type(module), "__call__", None)
            is_static = isinstance(call, staticmethod)
            signature = inspect.signature(module.__call__ if is_static else module)
            name = "self" if "self" not in signature.parameters else "module"
            first = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
            own = signature.parameters.values()
            self.__signature__ = signature.replace(parameters=[first, *own])

    @property
    def __wrapped__(self) -> Any:
        """The user's function, for the source line in messages."""
        inner = self._inner()
        if inner is None:
            raise AttributeError("__wrapped__")
        return inner

    def __call__(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    def __repr__(self) -> str:
        return self.__qualname__


# By the structure of a module: its function, and weak references that remove the entry as soon as
# an object in the structure is gone. Without this cache, JAX would trace and compile again for each
# model that a step returns.
_functions: Cache[Any, tuple[ModuleFunction, list[weakref.ref[Any]]]] = Cache(256)


def function_taking_module(fun: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """If `fun` is a module or a method of an nnx module, returns a function that takes the module,
    and (module,); else `fun` and (). (A method of an equinox module is a module.)"""
    if isinstance(fun, types.MethodType) and is_module_of_nnx(fun.__self__):
        return fun.__func__, (fun.__self__,)
    if is_equinox_module(fun) or is_module_of_nnx(fun):
        return _function_of(fun), (fun,)
    return fun, ()


def _function_of(module: Any) -> ModuleFunction:
    """All modules of one structure share a function."""
    call = CallPacker()((module,), {})
    structure = jax.tree.structure(call.args)
    known = _functions.get(structure)
    if known is None:
        # The objects that the structure compares by identity.
        told = [given.variable for given in call.variables]
        (packed,) = call.args
        told += [leaf for leaf in jax.tree.leaves(packed.argument()) if is_known_by_identity(leaf)]
        over = [ref for each in told if (ref := _reference(each, structure)) is not None]
        known = _functions.put(structure, (ModuleFunction(module), over))
    return known[0]


def _reference(known: Any, structure: Any) -> weakref.ref[Any] | None:
    """Returns a weak reference that removes the structure's entry when `known` is gone, and the
    structure cannot occur again. None if `known` has no weak references."""
    try:
        return weakref.ref(known, lambda _: _functions.pop(structure, None) and None)
    except TypeError:
        return None
