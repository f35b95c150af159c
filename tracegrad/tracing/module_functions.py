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

from tracegrad._jax.caches import facts_of
from tracegrad.tracing.nnx_objects import is_module as is_module_of_nnx
from tracegrad.tracing.statics import is_equinox_module


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


def function_taking_module(fun: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """If `fun` is a module or a method of an nnx module, returns a function that takes the module,
    and (module,); else `fun` and (). (A method of an equinox module is a module.)"""
    if isinstance(fun, types.MethodType) and is_module_of_nnx(fun.__self__):
        return fun.__func__, (fun.__self__,)
    if is_equinox_module(fun) or is_module_of_nnx(fun):
        return _function_of(fun), (fun,)
    return fun, ()


def _function_of(module: Any) -> ModuleFunction:
    """The modules of one class share a function; so do the wrappers of one class around a function.
    So JAX does not trace and compile again for each model that a step returns."""
    inner = inspect.unwrap(module)
    owner = type(module) if inner is module else getattr(inner, "__func__", inner)
    try:
        known = facts_of(owner)
    except TypeError:  # no weak references
        return ModuleFunction(module)
    key = ModuleFunction, type(module)
    if key not in known:
        known[key] = ModuleFunction(module)
    function: ModuleFunction = known[key]
    return function
