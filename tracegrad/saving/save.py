"""`save`: functions and their Variables → one file, from which they run and are differentiated."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

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

Platform = Literal["cpu", "cuda", "rocm", "tpu"]
PLATFORMS = get_args(Platform)

Path = str | os.PathLike[str]


def save(
    fun: Function | Mapping[str, Any],
    path: Path,
    specs: Any = None,
    *,
    gradient_order: int = 1,
    platforms: Sequence[Platform] | None = None,
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
    contents = _Contents(gradient_order, platforms)
    for name, function, given in _requests(fun, specs):
        _check_unicode(name, "a function")  # which XLA takes for granted
        if isinstance(function, LoadedFunction) and given is None:
            contents.add_loaded(name, function)
        else:
            contents.add_traced(name, function, given)
    contents.write(path, single=not isinstance(fun, Mapping))


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


@dataclass
class _Contents:
    """What is to be written, function by function.

    Attributes:
      order: how many times the functions can be differentiated.
      platforms: those on which they shall run.
      places: the Variables of all functions, each once, with its place in the manifest.
      modules: the Variables that are arrays of modules.
      functions: what the manifest says of the functions.
      arrays: programs, and texts.
    """

    order: int
    platforms: Sequence[str] | None
    places: dict[Variable, int] = field(default_factory=dict)
    modules: ModuleVariables = field(default_factory=ModuleVariables)
    functions: list[FunctionRecord] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)

    def add_traced(self, name: str, fun: Function, specs: Any) -> None:
        """A function, which is traced for its specs."""
        given = given_to(name, fun, specs)
        trace = functools.partial(traced_for, name, fun, given, self.modules)
        source = source_of(name, trace)
        traced = source.graph
        trees = trees_of(traced, given, name)
        programs = export(source, trees, self.order, self.platforms)
        # With respect to what a rule closes over there is no gradient: no tape should ask for it.
        own = range(-len(traced.variables), 0)
        refused = {i - len(traced.inputs) for i, _ in programs.tree.refused}
        self.modules.trained -= {traced.variables[i] for i in refused.intersection(own)}
        record = FunctionRecord(
            name=name,
            signature=signature_text(name, given, trees),
            parameters=given.parameters,
            constraints=tuple(_jax.symbolic_constraints(traced.in_avals)),
            reads=self._places(traced.variables),
            assigns=self._places(traced.assigned),
            platforms=tuple(programs.platforms or ()),
            gradient_order=self.order,
            calls={array: programs.calls[array] for array in programs.contents},
            program=programs.tree,
        )
        self._add(record, programs.contents, str(traced))

    def add_loaded(self, name: str, fun: LoadedFunction) -> None:
        """A loaded function, whose programs are written as they were."""
        if self.order > fun.gradient_order:
            raise ValueError(
                f"{name} was saved with gradient_order={fun.gradient_order}, and has no derivative "
                f"of order {self.order}: save the original with gradient_order={self.order}"
            )
        if self.platforms is not None and set(self.platforms) != set(fun.platforms):
            raise ValueError(
                f"{name} was saved for {', '.join(fun.platforms)}: leave out `platforms`, or give "
                "specs, with which it is traced anew"
            )
        record, contents = fun.written()
        record = msgspec.structs.replace(
            record,
            name=name,
            signature=name + record.signature.removeprefix(record.name),
            reads=self._places(fun.reads),
            assigns=self._places(fun.assigns),
        )
        self._add(record, contents, fun.graph_text)

    def _places(self, variables: Sequence[Variable]) -> tuple[int, ...]:
        return tuple(self.places.setdefault(each, len(self.places)) for each in variables)

    def _add(self, record: FunctionRecord, programs: Mapping[str, Any], text: str) -> None:
        # Names in it may be no Unicode.
        contents = {**programs, record.graph: text.encode("utf-8", "backslashreplace")}
        self.arrays |= {name: np.frombuffer(each, np.uint8) for name, each in contents.items()}
        self.functions.append(record)

    def write(self, path: Path, *, single: bool) -> None:
        """Writes the file, with the values that the Variables have now."""
        variables: list[VariableRecord] = []
        values: dict[str, Array] = {}  # on the CPU without a copy
        for variable, value in zip(self.places, peek(list(self.places)), strict=True):
            record = VariableRecord(
                key=_free_key(variable.name, values),
                name=variable.name,
                array=array_record(variable, value),
                trainable=variable.trainable or variable in self.modules.trained,
                key_type=_key_type(variable.name, value) if is_key(value) else None,
            )
            values[record.key] = stored(_in_numpy(variable.name, value))
            variables.append(record)
        manifest = Manifest(
            versions={"tracegrad": __version__, **_jax.versions()},
            single=single,
            variables=tuple(variables),
            functions=tuple(self.functions),
            digests={},
        )
        write_file(path, {**values, **self.arrays}, manifest)


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
