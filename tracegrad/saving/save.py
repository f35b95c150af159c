"""`save`: functions and their Variables → one file, from which they run and are differentiated."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.export
import numpy as np

import tracegrad
from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.saving import dimensions, documents, program, structure
from tracegrad.saving import manifest as manifests
from tracegrad.saving.container import Contents, write_container
from tracegrad.saving.load import LoadedFunction, LoadedFunctions
from tracegrad.saving.manifest import FunctionRecord, Manifest, ProgramRecord, VariableRecord
from tracegrad.saving.tensors import tensor_pieces
from tracegrad.saving.variables import array_of, is_key
from tracegrad.tracing import TracedFunction, graph
from tracegrad.tracing.graphs import function_name
from tracegrad.tracing.static import StaticArguments
from tracegrad.tracing.traced import BoundTracedFunction
from tracegrad.tracing.user_errors import innermost_user_line
from tracegrad.tracing.variable import Variable, peek

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

Path = str | os.PathLike[str]
Function = Callable[..., Any]


def save(
    fun: Function | Mapping[str, Any],
    path: Path,
    specs: Any = None,
    *,
    gradient_order: int = 1,
    platforms: Sequence[str] | None = None,
) -> None:
    """Writes a function with its Variables and its gradients to a file.

    What is written is the program that XLA compiles, the programs of its derivatives, in which
    the function's custom gradients, stopped gradients and recomputation are at work, and the
    values of the `Variable`s that it reads or assigns. None of its Python code is needed to load
    it with `load`, none is written, and no pickle. `docs/artefact.md` describes the file.

    The file appears at `path` in one step: whatever happens, the old one or the new one is there.

    Arguments:
      fun: a plain, jitted or traced function of pytrees of arrays, or one that was loaded. The
        pytrees are of dictionaries, lists, tuples, named tuples and None. Several functions, which
        share their Variables, are given as ``{name: (fun, specs)}``, without `specs` behind.
      path: the file to write, or to replace.
      specs: a list with one entry for each argument: an array or a `jax.ShapeDtypeStruct`, or a
        pytree of those; the value of an argument that is static. For keyword arguments a
        dictionary from their names. A dimension of any size is made by
        ``jax.export.symbolic_shape("batch, 3")``. Not needed for a loaded function, which then is
        written as it was saved, with the present values of its Variables.
      gradient_order: how many times the function can be differentiated after loading, in reverse
        mode; each costs a program as large as the last. 0: not at all.
      platforms: those of ``"cpu"``, ``"cuda"``, ``"rocm"``, ``"tpu"`` on which it shall run. They
        need not be those of this machine. Default: the one that JAX runs on.

    Raises:
      ValueError: part of the function cannot be saved (a callback, a print, an operation that
        exists in this process only, a loop that cannot be differentiated); the message names the
        operation and its line. An order or a platform that does not exist.
      TypeError: the specs do not fit the function, an array has no fixed rank, or a tree has
        containers of the user's own.
      OSError: the file cannot be written. In every case nothing is left behind.
      ImportError: a package is missing: ``pip install 'tracegrad[save]'``.

    Warns:
      UserWarning: the function closes over arrays of many MiB.

    >>> import os, tempfile
    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> from tracegrad.saving import load, save
    >>> w = tg.Variable([1.0, 2.0], name="w")
    >>> @tg.custom_gradient
    ... def clip(x):
    ...     return x, lambda dy: jnp.clip(dy, -0.5, 0.5)
    >>> def score(x):
    ...     return jnp.sum(clip(x * w.value), axis=-1)
    >>> path = os.path.join(tempfile.mkdtemp(), "score.tracegrad")
    >>> b, = jax.export.symbolic_shape("b")
    >>> save(score, path, [jax.ShapeDtypeStruct((b, 2), "float32")])
    >>> loaded = load(path)
    >>> loaded
    <loaded score(x: f32[b,2]) -> f32[b]>
    >>> jax.grad(lambda x: loaded(x)[0])(jnp.ones((1, 2)))
    Array([[0.5, 1. ]], dtype=float32)

    As ``tf.saved_model.save`` with ``experimental_custom_gradients``.
    """
    program.check_installed()
    _check_options(path, gradient_order, platforms)
    single = not isinstance(fun, (Mapping, LoadedFunctions))
    variables = _Variables()
    saved = [
        _saved(name, function, given, gradient_order, platforms, i, variables)
        for i, (name, function, given) in enumerate(_requests(fun, specs))
    ]
    document = manifests.to_json(
        Manifest(
            versions={"tracegrad": tracegrad.__version__, **_jax.versions()},
            single=single,
            variables=tuple(variables.records),
            functions=tuple(each.record for each in saved),
        )
    )
    members: dict[str, Contents] = {}
    for each in saved:
        members |= each.members
    if variables.records:
        members[manifests.VARIABLES] = tensor_pieces(variables.arrays())
    write_container(path, members, document)


def _check_options(path: Any, gradient_order: Any, platforms: Any) -> None:
    if _jax.staging_trace() is not None:
        raise RuntimeError("save is called inside a function that is being traced")
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"path should be a string or a path and is {path!r}: save(fun, path, specs)"
        )
    if os.path.isdir(path):
        raise IsADirectoryError(f"{os.fspath(path)!r} is a folder: give the name of a file")
    if type(gradient_order) is not int or gradient_order < 0:
        raise ValueError(
            "gradient_order should be an integer, 0 or greater (how many times the loaded "
            f"function can be differentiated), and is {gradient_order!r}"
        )
    if gradient_order > manifests.HIGHEST_ORDER:
        raise ValueError(
            f"gradient_order should be at most {manifests.HIGHEST_ORDER} and is {gradient_order}"
        )
    if platforms is None:
        return
    if isinstance(platforms, str) or not platforms:
        raise ValueError(f"platforms should be a list of names and is {platforms!r}")
    for name in platforms:
        if name not in PLATFORMS:
            hint = ': write "cuda" or "rocm"' if name == "gpu" else ""
            raise ValueError(f"platforms should be among {PLATFORMS}, and {name!r} is not{hint}")


def _requests(fun: Any, specs: Any) -> list[tuple[str, Any, Any]]:
    """Name, function and specs of each function that is to be saved."""
    if not isinstance(fun, (Mapping, LoadedFunctions)):
        return [(_name(fun), fun, specs)]
    if specs is not None:
        raise TypeError("several functions are saved by save({name: (fun, specs)}, path)")
    if not fun:
        raise ValueError("there is no function to save: the dictionary is empty")
    requests = []
    for name, entry in fun.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a function should be a string and is {name!r}")
        if isinstance(entry, LoadedFunction):
            entry = (entry, None)
        if not isinstance(entry, tuple) or len(entry) != 2:
            raise TypeError(
                f"several functions are saved by save({{name: (fun, specs)}}, path); for {name!r} "
                f"there is {entry!r}"
            )
        requests.append((name, *entry))
    return requests


def _name(fun: Any) -> str:
    if not callable(fun):
        raise TypeError(
            f"expected a function to save, or a dictionary {{name: (fun, specs)}}, and got {fun!r} "
            f"of type {type(fun).__name__}"
        )
    fun = getattr(fun, "__func__", fun)
    is_named = hasattr(fun, "__name__") or isinstance(fun, functools.partial)
    return function_name(fun) if is_named else type(fun).__name__


# -------------------------------------------------------------------------------------- Variables


class _Variables:
    """The Variables of all functions, each once."""

    def __init__(self) -> None:
        self.records: list[VariableRecord] = []
        self._variables: list[Variable] = []

    def places(self, variables: Sequence[Variable]) -> tuple[int, ...]:
        """Their positions in the list; new ones are put at its end."""
        return tuple(map(self._place, variables))

    def _place(self, variable: Variable) -> int:
        for i, known in enumerate(self._variables):
            if known is variable:
                return i
        if documents.text(variable.name) is not None:
            raise ValueError(f"the name of a Variable should be Unicode and is {variable.name!a}")
        self._variables.append(variable)
        self.records.append(
            VariableRecord(
                key=self._free_key(variable.name),
                name=variable.name,
                dtype=str(variable.dtype),
                shape=variable.shape,
                trainable=variable.trainable,
                key_type=_key_type(variable) if is_key(variable) else None,
            )
        )
        return len(self.records) - 1

    def _free_key(self, name: str) -> str:
        # An empty name, and the one by which safetensors calls its metadata, are no keys.
        base = name if name and name != "__metadata__" else "Variable"
        taken = {record.key for record in self.records}
        key, number = base, 1
        while key in taken:
            key, number = f"{base}_{number}", number + 1
        return key

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Their values now; on the CPU without a copy."""
        return {
            record.key: array_of(record.name, value)
            for record, value in zip(self.records, peek(self._variables), strict=True)
        }


def _key_type(variable: Variable) -> str:
    (value,) = peek([variable])
    kind = jax.random.key_impl(value)
    if not isinstance(kind, str):
        raise ValueError(
            f"the Variable {variable.name!r} holds random keys of a generator of the user's own, "
            f"{kind}, which has no name to be saved by"
        )
    return kind


# -------------------------------------------------------------------------------------- functions


@dataclass(frozen=True)
class _Saved:
    record: FunctionRecord
    members: dict[str, Contents]


def _saved(
    name: str,
    fun: Any,
    specs: Any,
    order: int,
    platforms: Sequence[str] | None,
    number: int,
    variables: _Variables,
) -> _Saved:
    _name(fun)
    if documents.text(name) is not None:
        raise ValueError(f"the name of a function should be Unicode and is {name!a}")
    if isinstance(fun, LoadedFunction) and specs is None:
        return _as_loaded(name, fun, order, platforms, number, variables)
    traced = _traced(name, fun, specs)
    parameters, arguments, result = _interface(traced, name)
    programs = program.export(traced, lambda: _traced(name, fun, specs), order, platforms)
    record = FunctionRecord(
        name=name,
        parameters=parameters,
        arguments=arguments,
        result=result,
        reads=variables.places(traced.variables),
        assigns=variables.places(traced.assigned),
        platforms=programs.platforms,
        gradient_order=order,
        constraints=_constraints(traced, name),
        program=_program_record(programs.function, programs.calls, number),
        graph=_graph_member(number),
    )
    contents = {_program_member(number, k): each for k, each in enumerate(programs.contents)}
    return _Saved(record, {**contents, record.graph: _utf_8(str(traced))})


def _constraints(traced: Graph, name: str) -> tuple[str, ...]:
    found = tuple(_jax.symbolic_constraints(traced.in_avals))
    for constraint in found:
        if (why := dimensions.why_no_constraint(constraint)) is not None:
            raise ValueError(f"{name} cannot be saved for sizes with {constraint}: {why}")
    return found


def _utf_8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")  # names of functions may be no Unicode


def _program_record(
    exported: program.Exported, calls: Sequence[tuple[str, ...]], number: int
) -> ProgramRecord:
    value, gradient = (
        None if each is None else _program_record(each, calls, number)
        for each in (exported.value, exported.gradient)
    )
    member, called = _program_member(number, exported.program), calls[exported.program]
    return ProgramRecord(member, exported.connected, exported.refused, called, value, gradient)


def _as_loaded(
    name: str,
    fun: LoadedFunction,
    order: int,
    platforms: Sequence[str] | None,
    number: int,
    variables: _Variables,
) -> _Saved:
    """The programs of a loaded function, as they were written."""
    if order > fun.gradient_order:
        raise ValueError(
            f"{name} was saved with gradient_order={fun.gradient_order}, and has no derivative of "
            f"order {order}: save the original with gradient_order={order}"
        )
    if platforms is not None and set(platforms) != set(fun.platforms):
        raise ValueError(
            f"{name} was saved for {', '.join(fun.platforms)}: leave out `platforms`, or give "
            "specs, with which it is traced anew"
        )
    record, contents = fun.written()
    moved = {member: _program_member(number, k) for k, member in enumerate(contents)}
    record = replace(
        record,
        name=name,
        reads=variables.places(fun.reads),
        assigns=variables.places(fun.assigns),
        program=_moved(record.program, moved),
        graph=_graph_member(number),
    )
    programs = {moved[member]: each for member, each in contents.items()}
    return _Saved(record, {**programs, record.graph: _utf_8(fun.graph_text)})


def _moved(record: ProgramRecord, names: Mapping[str, str]) -> ProgramRecord:
    value, gradient = (
        None if each is None else _moved(each, names) for each in (record.value, record.gradient)
    )
    return replace(record, member=names[record.member], value=value, gradient=gradient)


def _program_member(number: int, place: int) -> str:
    return f"functions/{number}/program_{place}.jax"


def _graph_member(number: int) -> str:
    return f"functions/{number}/graph.txt"


def _traced(name: str, fun: Function, specs: Any) -> Graph:
    static = StaticArguments()
    make = graph(fun)
    if isinstance(fun, TracedFunction):
        static, make = fun._pipeline.static, fun.graph
    elif isinstance(fun, BoundTracedFunction):
        static, make = _method(fun)
    args, kwargs = _checked_specs(name, fun, specs, static)
    try:
        return make(*args, **kwargs)
    except Exception as error:
        line = innermost_user_line(error.__traceback__)
        at = f", at {line}" if line else ""
        error.add_note(f"while {name} was traced to be saved, for {_shown(args, kwargs)}{at}")
        raise


def _method(fun: BoundTracedFunction) -> tuple[StaticArguments, Callable[..., Graph]]:
    """How a traced method is traced with what it is bound to as a part of it, not an argument."""

    @functools.wraps(fun.__wrapped__)
    def method(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    whole = fun._pipeline.static
    static = StaticArguments(frozenset(p - 1 for p in whole.positions if p > 0), whole.names)
    positions, names = tuple(static.positions), tuple(static.names)
    return static, graph(method, static_argnums=positions, static_argnames=names)


def _checked_specs(
    name: str, fun: Function, specs: Any, static: StaticArguments
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The specs as arguments to trace the function with."""
    if specs is None:
        raise TypeError(
            f"specs are missing: save({name}, path, specs) needs one array or "
            "jax.ShapeDtypeStruct for each argument"
        )
    if not isinstance(specs, (list, tuple, dict)) or structure.is_namedtuple(type(specs)):
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
    def text(leaf: Any) -> str:
        if not hasattr(leaf, "shape"):
            return repr(leaf)
        return f"{leaf.dtype}{dimensions.shown(leaf.shape)}"

    shown = [str(jax.tree.map(text, arg)) for arg in args]
    shown += [f"{name}={jax.tree.map(text, arg)}" for name, arg in kwargs.items()]
    return f"({', '.join(shown)})".replace("'", "")


def _interface(
    traced: Graph, name: str
) -> tuple[tuple[tuple[str, str], ...], tuple[Any, ...], Any]:
    """Parameters, the structure of the argument for each, and the structure of the result."""
    inputs = traced.in_avals[: len(traced.inputs) - len(traced.variables)]
    outputs = traced.out_avals[: len(traced.outputs) - len(traced.assigned)]
    args, kwargs = _unflattened(traced.in_tree, inputs, f"the arguments of {name}")
    result = _unflattened(traced.out_tree, outputs, f"the result of {name}")
    parameters = [*_positional(traced.signature, len(args))]
    parameters += [(key, "keyword") for key in kwargs]
    for parameter, _ in parameters:
        if (why := structure.why_no_name(parameter)) is not None:
            raise TypeError(
                f"{name} cannot be saved with an argument of this name: {why}. Give a dictionary "
                "as one argument instead"
            )
    arguments = [
        structure.describe(tree, _leaf, f"the argument {parameter}")
        for (parameter, _), tree in zip(parameters, (*args, *kwargs.values()), strict=True)
    ]
    return (
        tuple(parameters),
        tuple(arguments),
        structure.describe(result, _leaf, f"the result of {name}"),
    )


class _Leaf:
    """A leaf of a tree that is being described: of a class that no user has in a tree."""

    def __init__(self, aval: Any):
        self.aval = aval


def _unflattened(tree: Any, avals: Sequence[Any], what: str) -> Any:
    try:
        return jax.tree.unflatten(tree, [_Leaf(aval) for aval in avals])
    except Exception as error:
        raise TypeError(
            f"{what} have containers of the user's own ({tree}), which are rebuilt by Python code, "
            "and no code is saved: make dictionaries, lists or tuples of them"
        ) from error


def _leaf(leaf: Any) -> dict[str, Any]:
    if not isinstance(leaf, _Leaf):
        raise TypeError(
            f"is of type {type(leaf).__name__}, which is rebuilt by its Python code, and no code "
            "is saved: make a dictionary, list or tuple of it, or pass its arrays"
        )
    shape = [size if isinstance(size, int) else str(size) for size in leaf.aval.shape]
    for size in shape:
        if isinstance(size, str) and (why := dimensions.why_no_size(size)) is not None:
            raise TypeError(f"has the size {size}: {why}")
    return {"dtype": str(leaf.aval.dtype), "shape": shape}


def _positional(signature: inspect.Signature | None, count: int) -> list[tuple[str, str]]:
    """Names and kinds of the first `count` positional parameters."""
    named: list[tuple[str, str]] = []
    rest = "arg"
    for parameter in () if signature is None else signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = parameter.name
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            named.append((parameter.name, manifests.kind_name(parameter.kind)))
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
