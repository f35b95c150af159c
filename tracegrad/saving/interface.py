"""What a function that is saved takes and returns: its specs, its parameters, the trees of both."""

from __future__ import annotations

import functools
import inspect
import keyword
import unicodedata
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.notes import add_note
from tracegrad.ir.occurrence import line_of_error
from tracegrad.saving.manifest import KINDS, Kind
from tracegrad.saving.modules import ModuleVariables
from tracegrad.saving.trees import check_tree, of_types, tree_text, written_form
from tracegrad.tracing import TracedFunction
from tracegrad.tracing.graphs import graph_of_call
from tracegrad.tracing.static import NONE_STATIC, StaticArguments
from tracegrad.tracing.traced import BoundTracedFunction
from tracegrad.variables.nnx_objects import is_module
from tracegrad.variables.packed import unpacked
from tracegrad.variables.statics import is_array

Function = Callable[..., Any]

_KIND_NAMES = {kind: name for name, kind in KINDS.items()}


def traced_for(name: str, fun: Function, specs: Any, modules: ModuleVariables) -> Graph:
    """The graph of a function that is to be saved for these specs; `modules` has the arrays of the
    module that it has before its arguments."""
    static, call = NONE_STATIC, modules.without_module(fun)
    traced = fun if isinstance(fun, TracedFunction) and not fun._first else None
    if traced is not None:
        static = traced._pipeline.static
    elif isinstance(fun, TracedFunction | BoundTracedFunction):
        static, call = _method(fun, call)
    args, kwargs = _checked_specs(name, fun, specs, static)
    try:
        if traced is not None:
            return traced.graph(*args, **kwargs)
        return graph_of_call(call, args, kwargs, static)
    except Exception as error:
        text = f"while {name} was traced to be saved, for {_shown(args, kwargs)}"
        add_note(error, text, line_of_error(error.__traceback__))
        raise


def _method(
    fun: TracedFunction[..., Any] | BoundTracedFunction[..., Any], call: Function
) -> tuple[StaticArguments, Function]:
    """How a traced method, or module, is traced with its object as a part of it, no argument."""

    @functools.wraps(fun.__wrapped__)
    def method(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    whole = fun._pipeline.static
    positions = frozenset(p - 1 for p in whole.positions if p > 0)
    return StaticArguments(positions, whole.names), method


def _checked_specs(
    name: str, fun: Function, specs: Any, static: StaticArguments
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The specs as arguments to trace the function with."""
    if specs is None:
        raise TypeError(
            f"specs are missing: save({name}, path, specs) needs one array or "
            "jax.ShapeDtypeStruct for each argument"
        )
    if not isinstance(specs, (list, tuple, dict)) or hasattr(specs, "_fields"):
        raise TypeError(
            "specs should be a list with an entry for each argument, or a dictionary of keyword "
            f"arguments, and is of type {type(specs).__name__}: write [spec] for one argument"
        )
    args = () if isinstance(specs, dict) else tuple(specs)
    kwargs = specs if isinstance(specs, dict) else {}
    try:
        signature = inspect.signature(fun.__wrapped__ if hasattr(fun, "__wrapped__") else fun)
    except (TypeError, ValueError):
        signature = None
    if signature is not None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"the specs do not fit {name}{signature}: {error}. It is saved with one array or "
                f"jax.ShapeDtypeStruct for each argument; there are {len(specs)}"
            ) from None
        args, kwargs = bound.args, bound.kwargs  # given by name, and to be called without
    fixed = static.within(args)
    return (
        tuple(s if i in fixed else _spec(s, f"the spec {i}") for i, s in enumerate(args)),
        {
            key: s if key in static.names else _spec(s, f"the spec {key!r}")
            for key, s in kwargs.items()
        },
    )


def _spec(spec: Any, where: str) -> Any:
    """A spec with what only has a shape and a dtype, as specs of other libraries, as JAX's own."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float, complex)):
            return leaf
        if leaf is not spec and not is_array(leaf):
            return leaf  # static, as where the function is called
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(
                f"{where} should be an array, a jax.ShapeDtypeStruct or a tree of those, and has "
                f"{leaf!r} of type {type(leaf).__name__}"
            )
        shape = getattr(leaf.shape, "dims", leaf.shape)  # TensorFlow has None for no rank
        if shape is None:
            raise TypeError(
                f"{where} has no fixed rank: a program of XLA is made for one rank. Save one "
                "function for each that you need, save({name: (fun, specs), ...}, path); sizes may "
                'be left open, by jax.export.symbolic_shape("b, 3")'
            )
        if any(size is None for size in shape):
            raise TypeError(
                f"{where} has the shape {tuple(shape)}: name the sizes that are left open, so that "
                'it is known which are equal, by jax.export.symbolic_shape("b, 3")'
            )
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
            return leaf
        return _jax.struct(shape, getattr(leaf.dtype, "as_numpy_dtype", leaf.dtype))

    return jax.tree.map(convert, spec)


def _shown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    shown = [tree_text(arg) for arg in args]
    shown += [f"{name}={tree_text(arg)}" for name, arg in kwargs.items()]
    return f"({', '.join(shown)})"


def interface(
    traced: Graph, name: str
) -> tuple[tuple[tuple[str, Kind], ...], tuple[Any, ...], Any]:
    """The parameters, the argument for each and the result, as trees of types.

    Raises TypeError where a part of them cannot be written.
    """
    inputs = traced.in_avals[: len(traced.inputs) - len(traced.variables)]
    args, kwargs = written_form(unpacked(*of_types(traced.in_tree, inputs)))
    results = traced.out_avals[: traced.result_count]
    result = written_form(of_types(traced.out_tree, results))
    parameters = [*_positional(traced.signature, len(args))]
    parameters += [(key, "keyword") for key in kwargs]
    arguments = *args, *kwargs.values()
    for (parameter, _), tree in zip(parameters, arguments, strict=True):
        folded = unicodedata.normalize("NFKC", parameter)  # as Python reads names
        if folded != parameter or not parameter.isidentifier() or keyword.iskeyword(parameter):
            raise TypeError(
                f"{name} cannot be saved with an argument of this name: {parameter!a} is none that "
                "a parameter can have in Python. Give a dictionary as one argument instead"
            )
        if any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module))):
            raise TypeError(
                f"the argument {parameter} has a module of flax.nnx, which is rebuilt by its "
                "Python code, and no code is saved: save a function that closes over it, or one "
                "of nnx.to_pure_dict(nnx.state(module))"
            )
        check_tree(tree, f"the argument {parameter}")
    check_tree(result, f"the result of {name}")
    return tuple(parameters), arguments, result


def _positional(signature: inspect.Signature | None, count: int) -> list[tuple[str, Kind]]:
    """Names and kinds of the first `count` positional parameters."""
    named: list[tuple[str, Kind]] = []
    rest = "arg"
    for parameter in () if signature is None else signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = parameter.name
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            named.append((parameter.name, _KIND_NAMES[parameter.kind]))
    named = named[:count]
    if len(named) == count:
        return named
    taken = {name for name, _ in named}
    named = [(name, "positional") for name, _ in named]  # as more follow that have no name
    for i in range(count - len(named)):
        name = f"{rest}_{i}"
        while name in taken:
            name += "_"
        named.append((name, "positional"))
    return named
