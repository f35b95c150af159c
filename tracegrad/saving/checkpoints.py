"""Checkpoints of Variables: Orbax writes and reads them, on any number of processes; we seal them.

`seal` says what a checkpoint is, and when it counts.
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from tracegrad._jax.processes import agree
from tracegrad.ir.wording import brief, some
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.libraries import needed, safetensors_numpy
from tracegrad.saving.manifest import ArrayRecord
from tracegrad.saving.placement import array_record, asked_for, on, where_it_was
from tracegrad.saving.seal import (
    digests_of_files,
    files_of,
    last_sealed,
    next_step,
    read_seal,
    remove,
    seal,
    step_folder,
)
from tracegrad.saving.variables import (
    check_width,
    is_key,
    not_while_tracing,
    stored_form,
    variables_of,
)
from tracegrad.variables.lending import peek
from tracegrad.variables.variable import Variable

T = TypeVar("T")
PathLike = str | os.PathLike[str]

# Dtypes that Orbax does not know, with others of as many bits.
_AS = {"uint2": "int2", "uint4": "int4", "float8_e4m3": "uint8"}
_TIMEOUT = 600.0  # seconds to wait for the other processes


def save_variables(tree: Any, path: PathLike, *, timeout: float = _TIMEOUT) -> None:
    """Writes the values of the Variables in a tree of objects to a folder, by Orbax.

    Whatever is killed, and when, the old state is there, or the new one, whole. Of Variables that
    are spread over several processes each process writes its part: call it on all of them, with a
    folder that all see.

    Arguments:
      tree: as of `variables_of`, whose paths name the arrays.
      path: the folder; what was saved there before is replaced.
      timeout: how long to wait for another process, in seconds.

    Raises:
      ValueError: there is no Variable in the tree, or the processes have not the same.
      TimeoutError: some processes did not call this; it names them.
      RuntimeError: another process failed; or it is called in a function that is being traced.
      OSError: the folder cannot be written.
      ImportError: a package is missing: ``pip install 'tracegrad[save]'``.

    >>> import os, tempfile
    >>> from tracegrad import Variable, load_variables, save_variables
    >>> path = os.path.join(tempfile.mkdtemp(), "state")
    >>> weights = {"w": Variable([1.0, 2.0]), "b": Variable(0.5)}
    >>> save_variables(weights, path)
    >>> weights["w"].assign([0.0, 0.0])
    <Variable Variable: f32[2] = [0. 0.]>
    >>> load_variables(weights, path)
    >>> weights["w"]
    <Variable Variable: f32[2] = [1. 2.]>
    """
    not_while_tracing("save_variables")
    variables, folder = _some(tree), Path(os.path.abspath(path))
    values = _forms(variables)
    topic = f"save_variables({folder.name!r})"
    said = json.dumps({name: _summary(value) for name, value in values.items()})
    number = agree(topic, said, timeout, functools.partial(_next_number, topic, folder))
    new = step_folder(folder, number)
    checkpoints = needed("orbax.checkpoint")  # which takes a second

    def write() -> dict[str, str]:
        options = checkpoints.AsyncOptions(timeout_secs=max(1, int(timeout)))
        with checkpoints.StandardCheckpointer(async_options=options) as checkpointer:
            # It refuses arrays without elements.
            checkpointer.save(new, {name: _given(v) for name, v in values.items() if v.size})
            checkpointer.wait_until_finished()
        # Each process takes the digests of its share.
        return digests_of_files(new, files_of(new)[jax.process_index() :: jax.process_count()])

    def finish(found: Sequence[dict[str, str]]) -> None:
        arrays = {name: array_record(v, values[name]) for name, v in variables.items()}
        seal(new, arrays, {name: digest for each in found for name, digest in each.items()})

    try:
        _together(f"{topic} {number}", write, timeout, finish)
    except BaseException:
        if jax.process_index() == 0:
            remove(folder.glob(f"{new.name}*"))
        raise


def load_variables(tree: Any, path: PathLike, *, sharding: Any = None) -> None:
    """Assigns to the Variables in a tree of objects what `save_variables` wrote.

    Nothing is assigned unless all of it fits. What any number of processes wrote, on any mesh, any
    other number reads; each gets what its devices get, and compares every file with its SHA-256.

    Arguments:
      tree: as of `variables_of`.
      path: the folder; or a safetensors file of another program, with an array for each Variable,
        called by its path, which has no checksums.
      sharding: how the Variables shall lie on devices: a `jax.sharding.Sharding`, or a
        `PartitionSpec` on the mesh that is set, or a dictionary of these by the Variables' paths.
        Default, and for those that are not in the dictionary: as the Variable is; one that was
        never put on any device as the saved one was, where a mesh is set.

    Raises:
      ArtefactError: a file is damaged, missing, or one too many.
      ValueError: an array is missing, or there is one too many, or one of another shape; the mesh
        that is set has not the axes along which it was or shall be split; a Variable has 64 bits,
        and JAX is not set to.
      TypeError: an array is of another dtype.
      OSError: there is no whole checkpoint, or it may not be read.
      RuntimeError: another process failed.
      ImportError: a package is missing: ``pip install 'tracegrad[save]'``.

    >>> import os, tempfile
    >>> from safetensors.numpy import save_file
    >>> from tracegrad import Variable, load_variables
    >>> path = os.path.join(tempfile.mkdtemp(), "weights.safetensors")
    >>> save_file({"w": np.ones(2, np.float32)}, path)
    >>> weights = {"w": Variable([0.0, 0.0])}
    >>> load_variables(weights, path)
    >>> print(weights["w"].value)
    [1. 1.]
    """
    variables, folder = _some(tree), Path(os.path.abspath(path))
    check_width({str(variable.dtype) for variable in variables.values()}, "the Variables are of")
    forms = _forms(variables)
    if folder.is_file():
        arrays = _read_file(folder)
        records = {name: ArrayRecord(str(a.dtype), a.shape) for name, a in arrays.items()}
        shardings = _fitting(path, variables, forms, records, sharding)
    else:
        topic = f"load_variables({folder.name!r})"
        number = agree(topic, "", _TIMEOUT, lambda _: str(last_sealed(folder)))
        step = step_folder(folder, number)

        def check() -> dict[str, Any]:
            return _fitting(path, variables, forms, read_seal(path, step).arrays, sharding)

        shardings = _together(f"{topic} {number}", check, _TIMEOUT)
        arrays = _restored(path, step, forms, shardings)
    new = {
        name: array if isinstance(array, jax.Array) else on(array, shardings[name], name)
        for name, array in arrays.items()
    }
    for name, array in new.items():
        variables[name].assign(_as_variable(variables[name], array))


# --------------------------------------------------------------------------------------- written


def _some(tree: Any) -> dict[str, Variable]:
    variables = variables_of(tree)
    if not variables:
        raise ValueError(f"there is no Variable in {brief(tree)}")
    return variables


def _forms(variables: Mapping[str, Variable]) -> dict[str, Any]:
    """The arrays that are written of the values of Variables, of dtypes that Orbax knows."""

    def form(value: Any) -> Any:
        known = _AS.get(str(value.dtype))
        return stored_form(value) if known is None else jax.lax.bitcast_convert_type(value, known)

    return dict(zip(variables, map(form, peek(list(variables.values()))), strict=True))


def _summary(value: Any) -> int:
    """Other where processes would save other things: of what each holds for itself, its bytes."""
    text = f"{value.dtype} {value.shape} {value.sharding.is_fully_addressable}".encode()
    is_own = jax.process_count() > 1 and value.is_fully_addressable
    return zlib.crc32(np.asarray(value).tobytes() if is_own else b"", zlib.crc32(text))


def _next_number(topic: str, folder: Path, said: Sequence[str]) -> str:
    """The number of the next step, if all processes want to save the same."""
    first, *others = map(json.loads, said)
    for process, other in enumerate(others, 1):
        if other == first:
            continue
        names = [repr(name) for name in {**first, **other} if first.get(name) != other.get(name)]
        raise ValueError(
            f"{topic}: processes 0 and {process} want to save different things: "
            f"{some(names, 5) or 'another order'}. All have to have the same Variables; one that "
            "each holds for itself, on its own devices, has to have the same value on all of them"
        )
    if folder.is_file():
        raise FileExistsError(f"{str(folder)!r} is a file: save_variables writes a folder")
    folder.mkdir(exist_ok=True)
    return str(next_step(folder))


def _given(value: Any) -> Any:
    """What Orbax gets: of several processes, one writes what each holds for itself."""
    return np.asarray(value) if jax.process_count() > 1 and value.is_fully_addressable else value


def _together(
    topic: str,
    work: Callable[[], T],
    timeout: float,
    finish: Callable[[Sequence[T]], None] | None = None,
) -> T:
    """Does something on all processes, and on process 0, with what all found, what finishes it. If
    one fails, all do."""
    fault: Exception | None = None
    found: Any = None
    try:
        found = work()
    except Exception as error:
        fault = error

    def decide(told: Sequence[str]) -> str:
        if fault is not None:
            raise fault
        faults, results = zip(*map(json.loads, told), strict=True)
        for process, each in enumerate(faults):
            if each:
                raise RuntimeError(f"process {process} failed: {each}")
        if finish is not None:
            finish(results)
        return ""

    words = "" if fault is None else f"{type(fault).__name__}: {fault}"
    try:
        agree(topic, json.dumps([words, found if finish else None]), timeout, decide)
    except RuntimeError as error:
        raise fault or error from None
    result: T = found
    return result


# ------------------------------------------------------------------------------------------ read


def _read_file(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = safetensors_numpy.load_file(path)
    except OSError:
        raise
    except Exception as error:
        raise ArtefactError("file", f"it is no safetensors file: {error}", path) from error
    return found


def _fitting(
    path: PathLike,
    variables: Mapping[str, Variable],
    forms: Mapping[str, Any],
    records: Mapping[str, ArrayRecord],
    sharding: Any,
) -> dict[str, Any]:
    """The sharding for each Variable, None where it is left to JAX. Raises where what was saved is
    none for these Variables."""
    shown = os.fspath(path)
    missing = [repr(name) for name in variables if name not in records]
    more = [repr(name) for name in records if name not in variables]
    if missing or more:
        raise ValueError(
            f"{shown} has not the arrays of these Variables: "
            + "; ".join(
                f"{what} {some(names, 5)}"
                for what, names in (("missing", missing), ("too many", more))
                if names
            )
        )
    found = {}
    for name, variable in variables.items():
        record, what = records[name], f"the array {name!r} of {shown}"
        if record.shape != variable.shape:
            shape = list(variable.shape)
            raise ValueError(f"{what} has the shape {list(record.shape)}, {variable!r} {shape}")
        if record.dtype != str(variable.dtype):
            raise TypeError(f"{what} has the dtype {record.dtype}, {variable!r} {variable.dtype}")
        own = forms[name]
        asked = asked_for(sharding, name, f"the Variable {name!r}", of_keys=is_key(variable))
        if asked is None:
            is_placed = own.committed or len(own.sharding.device_set) > 1
            asked = own.sharding if is_placed else where_it_was(record.placement, what)
        found[name] = asked
    return found


def _restored(
    path: PathLike, step: Path, forms: Mapping[str, Any], shardings: Mapping[str, Any]
) -> dict[str, Any]:
    """The arrays of a checkpoint; in NumPy where a process has all of them to itself."""

    def wanted(name: str, form: Any) -> Any:
        sharding = shardings[name]
        if sharding is None or (jax.process_count() > 1 and sharding.is_fully_addressable):
            return np.empty(form.shape, form.dtype)
        return jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=sharding)  # type: ignore[no-untyped-call]

    template = {name: wanted(name, form) for name, form in forms.items() if form.size}
    try:
        with needed("orbax.checkpoint").StandardCheckpointer() as checkpointer:
            found: dict[str, Any] = checkpointer.restore(step, template)
    except Exception as error:
        raise ArtefactError(step.name, f"Orbax cannot read it: {error}", path) from error
    return found


def _as_variable(variable: Variable, stored: Any) -> Any:
    """The value of a Variable, of the form in which it was stored."""
    if is_key(variable):
        (own,) = peek([variable])
        return jax.random.wrap_key_data(stored, impl=jax.random.key_impl(own))
    if stored.dtype != variable.dtype:
        return jax.lax.bitcast_convert_type(stored, variable.dtype)
    return stored
