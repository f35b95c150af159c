"""`save`: functions and their Variables → one file, from which they run and are differentiated."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad._version import __version__
from tracegrad.saving.file import Array, stored, write_file
from tracegrad.saving.interface import (
    Function,
    given_to,
    name_of,
    signature_text,
    traced_for,
    trees_of,
)
from tracegrad.saving.libraries import msgspec, needed
from tracegrad.saving.loaded import LoadedFunction
from tracegrad.saving.manifest import (
    HIGHEST_ORDER,
    OWN,
    FunctionRecord,
    Manifest,
    VariableRecord,
)
from tracegrad.saving.modules import ModuleVariables
from tracegrad.saving.placement import array_record
from tracegrad.saving.program import export
from tracegrad.saving.source import source_of
from tracegrad.saving.variables import is_key, not_while_tracing, stored_form
from tracegrad.variables.lending import peek
from tracegrad.variables.variable import Variable

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

Path = str | os.PathLike[str]


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
    it with `load`, none is written, and no pickle. The file is one of the safetensors format, with
    the Variables as its arrays; `docs/artefact.md` describes it.

    The file appears at `path` in one step: whatever happens, the old one or the new one is there.

    Arguments:
      fun: a plain, jitted or traced function of pytrees of arrays, or one that was loaded. The
        pytrees are of dictionaries, lists, tuples, named tuples and None; a string in them is what
        the function is saved for. Of a module of flax.nnx, of its methods, and of what
        `functools.partial` makes with it first, the arrays that are used are Variables of the file,
        by their path. Of other models of classes the arrays are passed, or
        the model is closed over, and then they are constants. Several functions, which share
        their Variables, are given as ``{name: (fun, specs)}``, without `specs` behind.
      path: the file to write, or to replace.
      specs: a list with one entry for each argument: an array or a `jax.ShapeDtypeStruct`, or a
        pytree of those; the value of an argument that is static. For keyword arguments a
        dictionary from their names. A dimension of any size is made by
        ``jax.export.symbolic_shape("batch, 3")``. Not needed for a loaded function, which then is
        written as it was saved, with the present values of its Variables.
      gradient_order: how many times the function can be differentiated after loading, in reverse
        mode; each costs a program as large as the last. 0: not at all. Above 1, a custom gradient
        that is no derivative, or clips what arrives, may have other second derivatives than before:
        a gradient is a program by itself, with a forward pass of its own.
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
    >>> from tracegrad import load, save
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
    needed("flatbuffers")  # jax.export does
    _check_options(path, gradient_order, platforms)
    places: Places = {}
    modules = ModuleVariables()
    functions, programs = [], dict[str, Array]()
    for name, function, given in _requests(fun, specs):
        _check_unicode(name, "a function")
        if isinstance(function, LoadedFunction) and given is None:
            found = _as_loaded(name, function, gradient_order, platforms, places)
        else:
            found = _traced(name, function, given, gradient_order, platforms, places, modules)
        record, contents, text = found
        # Names may be no Unicode.
        contents = {**contents, record.graph: text.encode("utf-8", "backslashreplace")}
        programs |= {name: np.frombuffer(each, np.uint8) for name, each in contents.items()}
        functions.append(record)
    variables, arrays = _recorded(list(places), modules.trained)
    manifest = Manifest(
        versions={"tracegrad": __version__, **_jax.versions()},
        single=not isinstance(fun, Mapping),
        variables=variables,
        functions=tuple(functions),
        digests={},
    )
    write_file(path, {**arrays, **programs}, manifest)


def _check_options(path: Any, gradient_order: Any, platforms: Any) -> None:
    not_while_tracing("save")
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
    if gradient_order > HIGHEST_ORDER:
        raise ValueError(
            f"gradient_order should be at most {HIGHEST_ORDER} and is {gradient_order}"
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
    if not isinstance(fun, Mapping):
        return [(name_of(fun), fun, specs)]
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
        name_of(entry[0])
        requests.append((name, *entry))
    return requests


# -------------------------------------------------------------------------------------- Variables


Places = dict[Variable, int]
"""The Variables of all functions, each once, with its place in the manifest."""


def _places(variables: Sequence[Variable], known: Places) -> tuple[int, ...]:
    """The places of Variables; new ones come behind those that are known."""
    return tuple(known.setdefault(variable, len(known)) for variable in variables)


def _recorded(
    variables: Sequence[Variable], trained: Collection[Variable]
) -> tuple[tuple[VariableRecord, ...], dict[str, Array]]:
    """What the manifest says of Variables, and their values now; on the CPU without a copy."""
    records: list[VariableRecord] = []
    arrays: dict[str, Array] = {}
    for variable, value in zip(variables, peek(variables), strict=True):
        key = _free_key(variable.name, arrays)
        arrays[key] = stored(_in_numpy(variable.name, value))
        record = VariableRecord(
            key=key,
            name=variable.name,
            array=array_record(variable, value),
            trainable=variable.trainable or variable in trained,
            key_type=_key_type(variable.name, value) if is_key(value) else None,
        )
        records.append(record)
    return tuple(records), arrays


def _free_key(name: str, taken: Collection[str]) -> str:
    _check_unicode(name, "a Variable")
    # Not those by which safetensors calls its metadata, and we what is no Variable.
    is_key = name and name != "__metadata__" and not name.startswith(OWN)
    base = key = name if is_key else "Variable"
    number = 1
    while key in taken:
        key, number = f"{base}_{number}", number + 1
    return key


def _in_numpy(name: str, value: Any) -> Array:
    if not value.is_fully_addressable:
        raise ValueError(
            f"the Variable {name!r} is spread over several processes, of which this one holds a "
            "part, and a function is written by one process, with all of its Variables. Write "
            "these with save_variables, on all processes; load them on one, and save the function "
            "there"
        )
    return np.asarray(stored_form(value))


def _check_unicode(name: str, what: str) -> None:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"the name of {what} should be Unicode and is {name!a}") from None


def _key_type(name: str, value: Any) -> str:
    kind = jax.random.key_impl(value)
    if not isinstance(kind, str):
        raise ValueError(
            f"the Variable {name!r} holds random keys of a generator of the user's own, {kind}, "
            "which has no name to be saved by"
        )
    return kind


# -------------------------------------------------------------------------------------- functions


Saved = tuple[FunctionRecord, Mapping[str, Any], str]
"""What is written of a function: in the manifest, its programs, its Graph as text."""


def _traced(
    name: str,
    fun: Any,
    specs: Any,
    order: int,
    platforms: Sequence[str] | None,
    places: Places,
    modules: ModuleVariables,
) -> Saved:
    given = given_to(name, fun, specs)
    source = source_of(name, functools.partial(traced_for, name, fun, given, modules))
    traced = source.graph
    trees = trees_of(traced, given, name)
    programs = export(source, trees, order, platforms)
    # With respect to what a rule closes over there is no gradient: tapes should not ask for it.
    refused = {i - len(traced.inputs) for i, _ in programs.tree.refused}
    modules.trained.difference_update(
        variable
        for i, variable in enumerate(traced.variables, -len(traced.variables))
        if i in refused
    )
    record = FunctionRecord(
        name=name,
        signature=signature_text(name, given, trees),
        parameters=given.parameters,
        constraints=tuple(_jax.symbolic_constraints(traced.in_avals)),
        reads=_places(traced.variables, places),
        assigns=_places(traced.assigned, places),
        platforms=tuple(programs.platforms or ()),
        gradient_order=order,
        calls={array: programs.calls[array] for array in programs.contents},
        program=programs.tree,
    )
    return record, programs.contents, str(traced)


def _as_loaded(
    name: str, fun: LoadedFunction, order: int, platforms: Sequence[str] | None, places: Places
) -> Saved:
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
    record = msgspec.structs.replace(
        record,
        name=name,
        signature=name + record.signature.removeprefix(record.name),
        reads=_places(fun.reads, places),
        assigns=_places(fun.assigns, places),
    )
    return record, contents, fun.graph_text
