"""Checkpoints of Variables, on any number of processes: Orbax writes the files, `seal` seals them.

`seal` defines what a checkpoint is, and which checkpoint is loaded.
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np

from tracegrad._jax.processes import agree
from tracegrad.ir.wording import brief, some
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.libraries import needed
from tracegrad.saving.manifest import ArrayRecord
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

# Maps dtypes that Orbax does not support to supported dtypes with as many bits.
_SUPPORTED = {"uint2": "int2", "uint4": "int4", "float8_e4m3": "uint8"}
_TIMEOUT = 600.0  # seconds to wait for the other processes


def save_variables(tree: Any, path: PathLike, *, timeout: float = _TIMEOUT) -> None:
    """Writes the values of the Variables in a tree of objects to a folder, by Orbax.

    The state is replaced atomically: if a process is killed at any time, the folder has either the
    complete old or the complete new state. Each process writes its shards of Variables that are
    sharded over several processes: call this on all processes, with a folder that all can access.

    Arguments:
      tree: a tree as for `variables_of`, whose paths name the arrays.
      path: the folder; a state that was saved there before is replaced.
      timeout: how long to wait for another process, in seconds.

    Raises:
      ValueError: there is no Variable in the tree, or the processes save different Variables.
      TimeoutError: some processes did not call this; the message names them.
      RuntimeError: another process failed; or this is called in a function that is being traced.
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
    variables, folder = _require_variables(tree), Path(os.path.abspath(path))
    values = _arrays_to_write(variables)
    topic = f"save_variables({folder.name!r})"
    checksums = json.dumps({name: _checksum(value) for name, value in values.items()})
    number = agree(topic, checksums, timeout, functools.partial(_next_number, topic, folder))
    new = step_folder(folder, number)
    checkpoints = needed("orbax.checkpoint")  # importing it takes a second

    def write() -> dict[str, str]:
        options = checkpoints.AsyncOptions(timeout_secs=max(1, int(timeout)))
        with checkpoints.StandardCheckpointer(async_options=options) as checkpointer:
            # Orbax refuses arrays without elements.
            checkpointer.save(
                new, {name: _array_for_orbax(v) for name, v in values.items() if v.size}
            )
            checkpointer.wait_until_finished()
        # Each process computes the digests of its share of the files.
        return digests_of_files(new, files_of(new)[jax.process_index() :: jax.process_count()])

    def finish(digests: Sequence[dict[str, str]]) -> None:
        arrays = {n: ArrayRecord(str(v.dtype), tuple(v.shape)) for n, v in variables.items()}
        seal(new, arrays, {name: digest for each in digests for name, digest in each.items()})

    try:
        _run_on_all_processes(f"{topic} {number}", write, timeout, finish)
    except BaseException:
        if jax.process_index() == 0:
            remove(folder.glob(f"{new.name}*"))
        raise


def load_variables(tree: Any, path: PathLike) -> None:
    """Assigns the values that `save_variables` wrote to the Variables in a tree of objects.

    Either all Variables are assigned or none. Each Variable keeps its present sharding; the number
    of processes and the mesh may differ from those that saved. Each process reads the shards of its
    own devices, and compares every file with its SHA-256.

    Arguments:
      tree: a tree as for `variables_of`.
      path: the folder.

    Raises:
      ArtefactError: a file of the checkpoint is damaged or missing, or there is an extra file.
      ValueError: an array is missing, superfluous or of another shape; a Variable has 64 bits, but
        JAX is set to 32 bits.
      TypeError: an array has another dtype than the Variable.
      OSError: there is no complete checkpoint, or it cannot be read.
      RuntimeError: another process failed.
      ImportError: a package is missing: ``pip install 'tracegrad[save]'``.

    An array of a safetensors file of another program can be assigned:
    ``variables_of(tree)[name].assign(safetensors.numpy.load_file(path)[name])``.

    >>> import os, tempfile
    >>> from tracegrad import Variable, load_variables, save_variables
    >>> path = os.path.join(tempfile.mkdtemp(), "state")
    >>> save_variables({"w": Variable([1.0, 1.0])}, path)
    >>> weights = {"w": Variable([0.0, 0.0])}
    >>> load_variables(weights, path)
    >>> print(weights["w"].value)
    [1. 1.]
    """
    variables, folder = _require_variables(tree), Path(os.path.abspath(path))
    check_width({str(variable.dtype) for variable in variables.values()}, "the Variables are of")
    forms = _arrays_to_write(variables)
    topic = f"load_variables({folder.name!r})"
    number = agree(topic, "", _TIMEOUT, lambda _: str(last_sealed(folder)))
    step = step_folder(folder, number)

    def check() -> None:
        _check_records(path, variables, read_seal(path, step).arrays)

    _run_on_all_processes(f"{topic} {number}", check, _TIMEOUT)
    arrays = _read_checkpoint(path, step, forms)
    new = {
        name: array
        if isinstance(array, jax.Array)
        else jax.device_put(array, _present_sharding(forms[name]))
        for name, array in arrays.items()
    }
    for name, array in new.items():
        variables[name].assign(_to_variable_value(variables[name], array))


# --------------------------------------------------------------------------------------- writing


def _require_variables(tree: Any) -> dict[str, Variable]:
    variables = variables_of(tree)
    if not variables:
        raise ValueError(f"there is no Variable in {brief(tree)}")
    return variables


def _arrays_to_write(variables: Mapping[str, Variable]) -> dict[str, Any]:
    """Returns the values of the Variables, in dtypes that Orbax supports."""

    def convert(value: Any) -> Any:
        dtype = _SUPPORTED.get(str(value.dtype))
        return stored_form(value) if dtype is None else jax.lax.bitcast_convert_type(value, dtype)

    return dict(zip(variables, map(convert, peek(list(variables.values()))), strict=True))


def _checksum(value: Any) -> int:
    """Returns a checksum that differs if processes would save different values: of the dtype, the
    shape and whether the array is sharded over processes; and of the bytes, if each of several
    processes has the whole array."""
    text = f"{value.dtype} {value.shape} {value.sharding.is_fully_addressable}".encode()
    is_replicated = jax.process_count() > 1 and value.is_fully_addressable
    return zlib.crc32(np.asarray(value).tobytes() if is_replicated else b"", zlib.crc32(text))


def _next_number(topic: str, folder: Path, checksums: Sequence[str]) -> str:
    """Returns the number of the next checkpoint. Raises ValueError if the processes want to save
    different Variables."""
    first, *others = map(json.loads, checksums)
    for process, other in enumerate(others, 1):
        if other == first:
            continue
        names = [repr(name) for name in {**first, **other} if first.get(name) != other.get(name)]
        raise ValueError(
            f"{topic}: processes 0 and {process} want to save different things: "
            f"{some(names, 5) or 'another order'}. All processes have to have the same Variables; "
            "a Variable that each process holds on its own devices has to have the same value on "
            "all processes"
        )
    if folder.is_file():
        raise FileExistsError(f"{str(folder)!r} is a file: save_variables writes a folder")
    folder.mkdir(exist_ok=True)
    return str(next_step(folder))


def _array_for_orbax(value: Any) -> Any:
    """Orbax writes an array that each process holds as a whole only once if it is a NumPy array."""
    return np.asarray(value) if jax.process_count() > 1 and value.is_fully_addressable else value


def _run_on_all_processes(
    topic: str,
    work: Callable[[], T],
    timeout: float,
    finish: Callable[[Sequence[T]], None] | None = None,
) -> T:
    """Calls `work` on all processes, then `finish` with all results on process 0. Returns the
    result of this process. If one process fails, all processes raise."""
    fault: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        fault = error

    def decide(messages: Sequence[str]) -> str:
        if fault is not None:
            raise fault
        faults, results = zip(*map(json.loads, messages), strict=True)
        for process, each in enumerate(faults):
            if each:
                raise RuntimeError(f"process {process} failed: {each}")
        if finish is not None:
            finish(results)
        return ""

    words = "" if fault is None else f"{type(fault).__name__}: {fault}"
    try:
        agree(topic, json.dumps([words, result if finish else None]), timeout, decide)
    except RuntimeError as error:
        raise fault or error from None
    return cast(T, result)


# --------------------------------------------------------------------------------------- reading


def _present_sharding(form: Any) -> Any:
    """None for a value that was never put on a device."""
    is_placed = form.committed or len(form.sharding.device_set) > 1
    return form.sharding if is_placed else None


def _check_records(
    path: PathLike, variables: Mapping[str, Variable], records: Mapping[str, ArrayRecord]
) -> None:
    """Raises ValueError or TypeError if the records do not fit the Variables."""
    shown = os.fspath(path)
    missing = [repr(name) for name in variables if name not in records]
    more = [repr(name) for name in records if name not in variables]
    if missing or more:
        raise ValueError(
            f"the arrays in {shown} do not fit the Variables: "
            + "; ".join(
                f"{what} {some(names, 5)}"
                for what, names in (("missing", missing), ("too many", more))
                if names
            )
        )
    for name, variable in variables.items():
        record, what = records[name], f"the array {name!r} of {shown}"
        if record.shape != variable.shape:
            shape = list(variable.shape)
            raise ValueError(f"{what} has the shape {list(record.shape)}, but {variable!r} {shape}")
        if record.dtype != str(variable.dtype):
            dtype = variable.dtype
            raise TypeError(f"{what} has the dtype {record.dtype}, but {variable!r} {dtype}")


def _read_checkpoint(path: PathLike, step: Path, forms: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a checkpoint; as a NumPy array if this process holds it alone."""

    def template_of(form: Any) -> Any:
        sharding = _present_sharding(form)
        if sharding is None or (jax.process_count() > 1 and sharding.is_fully_addressable):
            return np.empty(form.shape, form.dtype)
        return jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=sharding)  # type: ignore[no-untyped-call]

    template = {name: template_of(form) for name, form in forms.items() if form.size}
    try:
        with needed("orbax.checkpoint").StandardCheckpointer() as checkpointer:
            arrays: dict[str, Any] = checkpointer.restore(step, template)
    except Exception as error:
        raise ArtefactError(step.name, f"Orbax cannot read it: {error}", path) from error
    return arrays


def _to_variable_value(variable: Variable, stored: Any) -> Any:
    if is_key(variable):
        (keys,) = peek([variable])
        return jax.random.wrap_key_data(stored, impl=jax.random.key_impl(keys))
    if stored.dtype != variable.dtype:
        return jax.lax.bitcast_convert_type(stored, variable.dtype)
    return stored
