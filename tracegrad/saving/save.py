"""`save` writes functions, their derivatives and their Variables to one file."""

from __future__ import annotations

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
    bind_specs,
    check_trees,
    parameters_of,
    saved_name,
    signature_text,
)
from tracegrad.saving.libraries import needed
from tracegrad.saving.manifest import (
    OWN,
    ArrayRecord,
    FunctionRecord,
    Manifest,
    VariableRecord,
)
from tracegrad.saving.modules import ModuleVariables
from tracegrad.saving.program import Programs
from tracegrad.saving.source import trace_to_save
from tracegrad.saving.variables import is_key, not_while_tracing, stored_form
from tracegrad.variables.lending import peek
from tracegrad.variables.variable import Variable

Platform = Literal["cpu", "cuda", "rocm", "tpu"]

Path = str | os.PathLike[str]


def save(
    fun: Function | Mapping[str, Any],
    path: Path,
    specs: Any = None,
    *,
    gradient_order: int = 1,
    platforms: Collection[Platform] | None = None,
) -> None:
    """Writes a function with its Variables and its gradients to a file.

    The file contains the program that XLA compiles, the programs of the function's derivatives, and
    the values of the `Variable`s that the function reads or assigns. The derivatives include the
    function's custom gradients, stopped gradients and recomputation. The file contains no Python
    code and no pickle, and `load` does not need the function's code. The file has the safetensors
    format; its arrays are the Variables and the programs. `docs/artefact.md` describes the format.

    The file is replaced atomically: `path` always has either the complete old or the new file.

    Arguments:
      fun: a plain, jitted, traced or loaded function of pytrees of arrays. The pytrees consist of
        dictionaries, lists, tuples and None, and of classes that are registered with `jax.export`
        (named tuples: ``jax.export.register_namedtuple_serialization``). If the function is a
        flax.nnx module, a method of one (also jitted or traced), or a `functools.partial` with one
        as first argument, the arrays of the module become Variables, named by their path. For other
        models, pass the arrays as arguments. Arrays of a model that the function closes over are
        constants. To save several functions that share Variables, pass ``{name: (fun, specs)}`` as
        `fun`, and leave out the argument `specs`.
      path: the file to write, or to replace.
      specs: a list with one entry for each argument: an array, a `jax.ShapeDtypeStruct`, or a
        pytree of these. For arguments passed by keyword, give a dictionary from their names to
        such entries in place of the list. For a dimension of any size, use
        ``jax.export.symbolic_shape("batch, 3")`` as the shape. The specs of a loaded function are
        ``loaded.specs``.
      gradient_order: how many times the loaded function can be differentiated in reverse mode; 0:
        never. Each order adds a program about as large as that of the order before. Above 1: if a
        custom gradient is not the true derivative, or clips its cotangent, its second derivatives
        may differ from those of the original function, because each gradient is a separate program
        with a forward pass of its own.
      platforms: the platforms on which the function can run: ``"cpu"``, ``"cuda"``, ``"rocm"``,
        ``"tpu"``. This machine need not have them. Default: the platform that JAX uses now.

    Raises:
      ValueError: an operation cannot be saved (a callback, a print, an operation that exists in
        this process only, a loop that cannot be differentiated); the message names the operation
        and its line. Also if `gradient_order` or `platforms` is invalid.
      TypeError: the specs do not fit the function, a pytree has a container of a custom class, or
        a dictionary of functions is empty or has an entry that is not ``name: (fun, specs)``.
      OSError: the file cannot be written. No error leaves an incomplete file.
      ImportError: a package is missing: ``pip install 'tracegrad[save]'``.

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

    It corresponds to ``tf.saved_model.save`` with ``experimental_custom_gradients``.
    """
    needed("flatbuffers")  # jax.export needs it
    _check_options(gradient_order, platforms)
    contents = _Contents(gradient_order, None if platforms is None else sorted(platforms))
    for name, function, its_specs in _list_functions(fun, specs):
        contents.add(name, function, its_specs)
    contents.write(path, single=not isinstance(fun, Mapping))


def _check_options(gradient_order: Any, platforms: Any) -> None:
    not_while_tracing("save")
    known = get_args(Platform)
    is_list = isinstance(platforms, Collection) and not isinstance(platforms, str)
    are_known = is_list and bool(platforms) and all(each in known for each in platforms)
    if platforms is not None and not are_known:
        raise ValueError(f"platforms should be a list of names in {known}, but is {platforms!r}")
    if type(gradient_order) is not int or gradient_order < 0:
        raise ValueError(
            "gradient_order should be an integer, 0 or greater (how many times the loaded "
            f"function can be differentiated), but is {gradient_order!r}"
        )


def _list_functions(fun: Any, specs: Any) -> list[tuple[str, Any, Any]]:
    """Returns (name, function, specs) for each function to save."""
    if not isinstance(fun, Mapping):
        return [(saved_name(fun), fun, specs)]
    wrong = [
        f"the entry {name!r}: {entry!r}"
        for name, entry in fun.items()
        if not (isinstance(name, str) and isinstance(entry, tuple) and len(entry) == 2)
    ]
    if not fun or specs is not None or wrong:
        raise TypeError(
            "several functions are saved by save({name: (fun, specs)}, path), with names that are "
            "strings and without other specs, but got "
            + (wrong[0] if wrong else f"{fun!r} and specs={specs!r}")
        )
    return [(name, *pair) for name, pair in fun.items()]


@dataclass
class _Contents:
    """The contents of the file. Functions are added one by one, before `write` is called.

    Attributes:
      order: how many times the functions can be differentiated.
      platforms: the platforms on which the functions can run; None: the default.
      places: maps each Variable of the functions to its position in the manifest.
      modules: the Variables that are arrays of modules.
      arrays: the programs, as arrays of bytes, by name.
    """

    order: int
    platforms: Sequence[str] | None
    places: dict[Variable, int] = field(default_factory=dict)
    modules: ModuleVariables = field(default_factory=ModuleVariables)
    functions: list[FunctionRecord] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)

    def add(self, name: str, fun: Function, specs: Any) -> None:
        given = bind_specs(name, fun, specs)
        source = trace_to_save(self.modules.without_module(fun), given, name)
        programs = Programs(name, self.order, self.platforms)
        try:
            program = programs.write(source)
        except Exception:
            check_trees(source.arguments, source.result, name)  # a container may be the cause
            raise
        parameters = parameters_of(given)
        record = FunctionRecord(
            name=name,
            signature=signature_text(name, parameters, source.arguments, source.result),
            parameters=parameters,
            constraints=tuple(_jax.symbolic_constraints(source.avals)),
            reads=self._places(source.graph.variables),
            assigns=self._places(source.graph.assigned),
            platforms=tuple(programs.platforms or ()),
            gradient_order=self.order,
            calls=programs.calls,
            program=program,
        )
        self.arrays |= {n: np.frombuffer(x, np.uint8) for n, x in programs.contents.items()}
        self.functions.append(record)

    def _places(self, variables: Sequence[Variable]) -> tuple[int, ...]:
        return tuple(self.places.setdefault(each, len(self.places)) for each in variables)

    def write(self, path: Path, *, single: bool) -> None:
        variables: list[VariableRecord] = []
        values: dict[str, Array] = {}  # arrays on the CPU are not copied
        for variable, value in zip(self.places, peek(list(self.places)), strict=True):
            # msgspec refuses a generator without a name.
            generator: Any = jax.random.key_impl(value) if is_key(value) else None
            record = VariableRecord(
                key=_choose_key(variable.name, values),
                name=variable.name,
                array=ArrayRecord(str(variable.dtype), tuple(variable.shape)),
                trainable=variable.trainable,
                key_type=generator,
            )
            values[record.key] = stored(np.asarray(stored_form(value)))
            variables.append(record)
        manifest = Manifest(
            versions={"tracegrad": __version__, **_jax.versions()},
            digests={},
            single=single,
            variables=tuple(variables),
            functions=tuple(self.functions),
        )
        write_file(path, {**values, **self.arrays}, manifest)


def _choose_key(name: str, taken: Collection[str]) -> str:
    # Reserved: safetensors' name for its metadata, and names of this format's other arrays.
    is_allowed = name and name != "__metadata__" and not name.startswith(OWN)
    base = key = name if is_allowed else "Variable"
    number = 1
    while key in taken:
        key, number = f"{base}_{number}", number + 1
    return key
