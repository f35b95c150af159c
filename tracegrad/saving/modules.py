"""Makes Variables of the arrays of a flax.nnx module, if the module or a method of it is saved."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax

from tracegrad.ir.paths import path_name
from tracegrad.rewriting.rewrite import RewrittenFunction
from tracegrad.tracing.nnx_objects import (
    is_module,
    is_variable_of_nnx,
    keys_of_path,
    nnx,
)
from tracegrad.tracing.traced import TracedFunction
from tracegrad.variables.variable import Variable


class ModuleVariables:
    """Has one Variable for each array in an nnx.Variable, shared by all functions of a file. The
    Variables for arrays of `nnx.Param`s are trainable: tapes watch them after loading."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Any, Variable]] = {}

    def without_module(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that takes only the arguments: it builds its module from Variables,
        and assigns to them the changes that a call makes to the module. Returns `fun` if `fun` has
        no flax.nnx module."""
        module, of = _split_module_from_function(fun)
        if not is_module(module):
            return fun

        @functools.wraps(fun, updated=())
        def function(*args: Any, **kwargs: Any) -> Any:
            graphdef, state = nnx().split(module)
            variables, structure = self._make_variables(module, state)
            before = [v.value if isinstance(v, Variable) else v for v in variables]
            copy = nnx().merge(graphdef, jax.tree.unflatten(structure, before))
            result = of(copy)(*args, **kwargs)
            after, changed = jax.tree.flatten(nnx().split(copy)[1])
            if changed != structure:
                raise TypeError(
                    f"a call changes the structure of {type(module).__name__}, which a file cannot "
                    "represent: call it once before it is saved. If it collects values (`sow`), "
                    "save functools.partial(f, module) of a function f that calls the module, "
                    "and then removes the values: nnx.pop(module, nnx.Intermediate)"
                )
            for variable, old, new in zip(variables, before, after, strict=True):
                if new is not old and isinstance(variable, Variable):
                    variable.assign(new)
            return result

        return function

    def _make_variables(self, module: Any, state: Any) -> tuple[list[Any], Any]:
        """Returns the leaves and the structure of a module's state, with Variables for the
        arrays."""
        originals = {
            path: node
            for path, node in nnx().iter_graph(module, graph=True)
            if is_variable_of_nnx(node)
        }
        found: list[Any] = []
        for keys, leaf in jax.tree.leaves_with_path(state, is_leaf=is_variable_of_nnx):
            arrays = jax.tree.leaves(leaf)
            path = keys_of_path(keys)
            original = originals.get(path)
            if original is None:  # an array that is in no nnx.Variable is a constant
                found += arrays
                continue
            name = path_name(path)
            found += [
                self._make_variable(original, i, name, array) for i, array in enumerate(arrays)
            ]
        return found, jax.tree.structure(state)

    def _make_variable(self, original: Any, place: int, name: str, array: Any) -> Variable:
        key = id(original), place
        if key not in self._known:
            variable = Variable(array, trainable=isinstance(original, nnx().Param), name=name)
            self._known[key] = original, variable
        return self._known[key][1]


def _split_module_from_function(fun: Any) -> tuple[Any, Callable[[Any], Callable[..., Any]]]:
    """Returns the object that a function calls, or whose method it is, and a function that makes
    the same function of another object. The function may be traced, rewritten, or jitted by JAX or
    flax."""
    if isinstance(fun, functools.partial) and fun.args:
        _, *more = fun.args
        return fun.args[0], lambda other: functools.partial(fun.func, other, *more, **fun.keywords)
    if isinstance(fun, types.MethodType):
        return fun.__self__, lambda other: types.MethodType(fun.__func__, other)
    is_rule = isinstance(fun, (TracedFunction, RewrittenFunction))
    if is_rule or (hasattr(fun, "lower") and hasattr(fun, "__wrapped__")):  # or jitted
        module, of = _split_module_from_function(fun.__wrapped__)
        return module, (lambda other: type(fun)(of(other), *fun._made_with)) if is_rule else of
    return fun, lambda other: other
