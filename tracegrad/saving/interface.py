"""The arguments and results of a function to save: its specs, its parameters, and their pytrees."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.notes import add_note
from tracegrad.ir.occurrence import line_of_error
from tracegrad.saving.manifest import KINDS, Kind
from tracegrad.saving.modules import ModuleVariables
from tracegrad.saving.trees import check_leaves, of_types, tree_text
from tracegrad.tracing.graphs import function_name, graph_of_call
from tracegrad.tracing.nnx_objects import is_module
from tracegrad.tracing.packed import unpack_arguments
from tracegrad.variables.trees import values_of

Function = Callable[..., Any]

_KIND_NAMES = {kind: name for name, kind in KINDS.items()}
_ANY = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


def saved_name(fun: Any) -> str:
    """Raises TypeError if `fun` is not callable."""
    if not callable(fun):
        raise TypeError(
            f"expected a function to save, or a dictionary {{name: (fun, specs)}}, but got {fun!r} "
            f"of type {type(fun).__name__}"
        )
    fun = inspect.unwrap(getattr(fun, "__func__", fun), stop=lambda fun: hasattr(fun, "__name__"))
    is_named = hasattr(fun, "__name__") or isinstance(fun, functools.partial)
    return function_name(fun) if is_named else type(fun).__name__


def parameters_of(given: inspect.BoundArguments) -> tuple[tuple[str, Kind], ...]:
    """Returns the names and kinds of the saved function's parameters. A parameter behind an omitted
    one, which keeps its default value, becomes a keyword parameter."""
    by_name, parameters = given.kwargs, given.signature.parameters

    def kind(name: str) -> Kind:
        found = _KIND_NAMES[parameters[name].kind]
        return "keyword" if found == "either" and name in by_name else found

    return tuple((name, kind(name)) for name in given.arguments)


def _of_arguments(fun: Function, given: inspect.BoundArguments) -> Function:
    """Returns a function of the parameters for which there are specs, by position."""

    def function(*arguments: Any) -> Any:
        by_name = dict(zip(given.arguments, arguments, strict=True))
        bound = inspect.BoundArguments(given.signature, by_name)
        return fun(*bound.args, **bound.kwargs)

    functools.update_wrapper(function, fun, updated=())
    function.__name__ = saved_name(fun)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [inspect.Parameter(name, kind) for name in given.arguments]
    function.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    return function


def bind_specs(name: str, fun: Function, specs: Any) -> inspect.BoundArguments:
    """Returns the specs by parameters. The spec of ``*args`` is a tuple, the spec of ``**kwargs`` a
    dictionary. Raises TypeError if the specs do not fit the function."""
    if specs is None:
        raise TypeError(
            f"specs are missing: save({name}, path, specs) needs one array or "
            "jax.ShapeDtypeStruct for each argument"
        )
    if not isinstance(specs, (list, tuple, dict)) or hasattr(specs, "_fields"):
        raise TypeError(
            "specs should be a list with an entry for each argument, or a dictionary of keyword "
            f"arguments, but is of type {type(specs).__name__}: write [spec] for one argument"
        )
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        signature = _ANY
    try:
        args, kwargs = ((), specs) if isinstance(specs, dict) else (specs, {})
        given = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"the specs do not fit {name}{signature}: {error}. Give one array or "
            f"jax.ShapeDtypeStruct for each argument; there are {len(specs)}"
        ) from None
    if len(_jax.symbolic_scopes(jax.tree.leaves(given.arguments))) > 1:
        raise TypeError(
            f"the specs of {name} have symbolic sizes from several calls of "
            "jax.export.symbolic_shape, which are different sizes for JAX even if they have the "
            'same name: make all sizes in one call, b, n = jax.export.symbolic_shape("b, n"), or '
            "give all calls one scope=jax.export.SymbolicScope()"
        )
    for parameter, spec in given.arguments.items():
        _check_no_module(spec, f"the argument {parameter}")
        given.arguments[parameter] = values_of(spec)
    return given


def trace_for_specs(
    name: str, fun: Function, given: inspect.BoundArguments, modules: ModuleVariables
) -> Graph:
    """If the function has a flax.nnx module, `modules` makes Variables of the module's arrays."""
    try:
        called = _of_arguments(modules.without_module(fun), given)
        return graph_of_call(called, tuple(given.arguments.values()), {})
    except Exception as error:
        specs = ", ".join(f"{key}: {tree_text(spec)}" for key, spec in given.arguments.items())
        text = f"while {name} was traced to be saved, for ({specs})"
        add_note(error, text, line_of_error(error.__traceback__))
        raise


@dataclass(frozen=True)
class Trees:
    """The pytrees of types of a function's arguments, by the name of the parameter, and of its
    result."""

    arguments: dict[str, Any]
    result: Any

    def check(self, check: Callable[[Any, str], None], name: str) -> None:
        """Calls ``check(tree, description)`` for each pytree; `name` is the function's name."""
        for parameter, tree in self.arguments.items():
            check(tree, f"the argument {parameter}")
        check(self.result, f"the result of {name}")


def trees_of(traced: Graph, given: inspect.BoundArguments, name: str) -> Trees:
    """Raises TypeError if a leaf cannot be written."""
    inputs = traced.in_avals[: len(traced.inputs) - len(traced.variables)]
    arguments, _ = unpack_arguments(*of_types(traced.in_tree, inputs))
    result = of_types(traced.out_tree, traced.out_avals[: traced.result_count])
    _check_no_module(result, f"the result of {name}")
    found = Trees(dict(zip(given.arguments, arguments)), result)
    found.check(check_leaves, name)
    return found


def _check_no_module(tree: Any, where: str) -> None:
    leaves = jax.tree.leaves(tree, is_leaf=is_module)
    if (module := next(filter(is_module, leaves), None)) is not None:
        raise TypeError(
            f"{where} has an object of flax.nnx ({type(module).__name__}), which only its Python "
            "code can rebuild, but no code is saved: save the module, its method, "
            "functools.partial(f, module), a function that closes over the module, or a function "
            "of nnx.to_pure_dict(nnx.state(module)). Put several modules into one, for example a "
            "model and its optimizer"
        )


def signature_text(name: str, parameters: Iterable[tuple[str, Kind]], trees: Trees) -> str:
    """As one line: ``score(x: f32[b,2]) -> f32[b]``."""
    shown = [
        f"{kind if kind in ('*', '**') else ''}{parameter}: {tree_text(trees.arguments[parameter])}"
        for parameter, kind in parameters
    ]
    return f"{name}({', '.join(shown)}) -> {tree_text(trees.result)}"
