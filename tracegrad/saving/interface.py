"""The arguments and the result of a function to save: its specs, parameters, and pytrees."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.export

from tracegrad import _jax
from tracegrad.ir.paths import path_name
from tracegrad.ir.wording import brief
from tracegrad.saving.manifest import KINDS, Kind
from tracegrad.tracing.graphs import function_name
from tracegrad.tracing.nnx_objects import is_module
from tracegrad.variables.trees import values_of

Function = Callable[..., Any]

_KIND_NAMES = {kind: name for name, kind in KINDS.items()}
_ANY = inspect.signature(lambda *args, **kwargs: None)


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


def bind_specs(name: str, fun: Function, specs: Any) -> inspect.BoundArguments:
    """Returns the specs by parameters. The spec of ``*args`` is a tuple, the spec of ``**kwargs`` a
    dictionary. Raises TypeError if the specs do not fit the function."""
    if specs is None:
        raise TypeError(
            f"the specs of {name} are missing: give a list with one array or jax.ShapeDtypeStruct "
            "for each argument, or a dictionary of keyword arguments"
        )
    if not isinstance(specs, (list, tuple, dict)) or hasattr(specs, "_fields"):
        raise TypeError(
            "specs should be a list with one array or jax.ShapeDtypeStruct for each argument, or a "
            f"dictionary of keyword arguments, but is {specs!r}: write [spec] for one argument"
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
    for parameter, spec in given.arguments.items():
        given.arguments[parameter] = spec = values_of(spec)
        check_leaves(spec, f"the argument {parameter}", _SPEC)
    sizes = [size for spec in jax.tree.leaves(given.arguments) for size in jax.typeof(spec).shape]
    if len({size.scope for size in sizes if jax.export.is_symbolic_dim(size)}) > 1:
        raise TypeError(
            f"the arguments of {name} cannot be saved: they have symbolic sizes from several calls "
            "of jax.export.symbolic_shape, and to JAX, b from another call is another size: make "
            'all sizes in one call, b, n = jax.export.symbolic_shape("b, n")'
        )
    return given


def parameters_of(given: inspect.BoundArguments) -> tuple[tuple[str, Kind], ...]:
    """Returns the names and kinds of the saved function's parameters. A parameter behind an omitted
    one, which keeps its default value, becomes a keyword parameter."""
    by_name, parameters = given.kwargs, given.signature.parameters

    def kind(name: str) -> Kind:
        found = _KIND_NAMES[parameters[name].kind]
        return "keyword" if found == "either" and name in by_name else found

    return tuple((name, kind(name)) for name in given.arguments)


def positional(fun: Function, given: inspect.BoundArguments) -> Function:
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


def tree_of_types(structure: Any, avals: Iterable[Any]) -> Any:
    return jax.tree.unflatten(structure, [_jax.struct(aval.shape, aval.dtype) for aval in avals])


_SPEC = (
    ": as a spec, give an array or a jax.ShapeDtypeStruct, with sizes >= 0 or of "
    'jax.export.symbolic_shape("batch, 3")'
)


def check_leaves(tree: Any, where: str, advice: str = "") -> None:
    """Raises TypeError, with the path, for a leaf that is neither an array nor the type of one."""
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_module):
        if not _is_array_or_type(leaf):
            raise TypeError(
                f"{path_name(path, where)} is {brief(leaf)}. A saved function takes and returns "
                f"arrays only{advice}. Let the function close over other objects. Save a flax.nnx "
                "module itself, its method, or functools.partial(f, module); put several modules, "
                "for example a model and its optimizer, into one"
            )


def _is_array_or_type(leaf: Any) -> bool:
    if is_module(leaf):  # it may be a pytree, which JAX would take
        return False
    try:
        shape = jax.eval_shape(lambda leaf: leaf, leaf).shape
    except Exception:
        return False
    return all(jax.export.is_symbolic_dim(size) or size >= 0 for size in shape)


def check_trees(arguments: Mapping[str, Any], result: Any, name: str) -> None:
    """Raises TypeError if `jax.export` cannot write the arguments or the result: for a container
    of a class."""
    for where, trees in (("arguments", arguments), ("result", {"result": result})):
        try:
            types = jax.eval_shape(lambda trees: trees, trees)
            jax.export.export(jax.jit(lambda **trees: ()))(**types).serialize(vjp_order=0)
        except Exception as error:
            raise TypeError(
                f"the {where} of {name} cannot be saved: {str(error).rstrip('.')}. (A container of "
                "a class is rebuilt by Python code, and no code is saved: convert it to a "
                "dictionary, list or tuple; or pass its arrays, `jax.tree.leaves`, to a function "
                "that closes over the rest of it; or let the function close over all of it; or "
                "register the class, also in the process that loads the function)"
            ) from error


class _Shown(str):
    __slots__ = ()
    __repr__ = str.__str__


def _text_of(tree: Any) -> str:
    """Returns a tree of types as one line: ``{'x': f32[rows,3]}``."""

    def text(leaf: Any) -> _Shown:
        return _Shown(_jax.type_text(jax.core.ShapedArray(leaf.shape, leaf.dtype)).replace(" ", ""))

    return repr(jax.tree.map(text, tree))


def signature_text(
    name: str,
    parameters: Iterable[tuple[str, Kind]],
    arguments: Mapping[str, Any],
    result: Any,
) -> str:
    """Returns one line: ``score(x: f32[b,2]) -> f32[b]``."""
    return f"{name}({parameters_text(parameters, arguments)}) -> {_text_of(result)}"


def parameters_text(parameters: Iterable[tuple[str, Kind]], arguments: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{kind if kind in ('*', '**') else ''}{parameter}: {_text_of(arguments[parameter])}"
        for parameter, kind in parameters
    )
