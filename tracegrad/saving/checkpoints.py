"""Checkpoints of Variables, on any number of processes: Orbax writes the files, `seal` seals them.

`seal` defines what a checkpoint is, and which checkpoint is loaded.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tracegrad.ir.wording import brief, some
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.libraries import needed
from tracegrad.saving.manifest import ArrayRecord
from tracegrad.saving.seal import (
    SEAL,
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

PathLike = str | os.PathLike[str]


def save_variables(tree: Any, path: PathLike) -> None:
    """Writes the values of the Variables in a tree of objects to a folder, by Orbax.

    The state is replaced atomically: if a process is killed at any time, the folder has either the
    complete old or the complete new state. Each process writes its shards of Variables that are
    sharded over several processes: call this on all processes, with a folder that all can access.
    A process waits for the others.

    Arguments:
      tree: a tree as for `variables_of`, whose paths name the arrays.
      path: the folder; a state that was saved there before is replaced.

    Raises:
      ValueError: there is no Variable in the tree, or the processes save different Variables.
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
    if folder.is_file():
        raise FileExistsError(f"{str(folder)!r} is a file: save_variables writes a folder")
    values = _arrays_to_write(variables)
    if len({*_gather(lambda: _checksum(values))}) > 1:
        raise ValueError(
            "the processes want to save different Variables. All processes have to have the same "
            "Variables; a Variable that each process holds on its own devices has to have the same "
            "value on all processes"
        )
    folder.mkdir(exist_ok=True)
    new = step_folder(folder, _gather(lambda: next_step(folder))[0])

    def write() -> int:
        with needed("orbax.checkpoint").StandardCheckpointer() as checkpointer:
            # Orbax refuses arrays without elements.
            checkpointer.save(
                new, {name: _array_for_orbax(v) for name, v in values.items() if v.size}
            )
            checkpointer.wait_until_finished()
        return 0

    def finish() -> int:
        if jax.process_index() == 0:
            arrays = {n: ArrayRecord(str(v.dtype), tuple(v.shape)) for n, v in variables.items()}
            seal(new, arrays, digests_of_files(new, files_of(new)))
        return 0

    try:
        _gather(write)
        _gather(finish)
    except BaseException:
        # Once the new state has a seal, the old state may be gone.
        if jax.process_index() == 0 and not (new / SEAL).exists():
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
    step = step_folder(folder, _gather(lambda: last_sealed(folder))[0])

    def check() -> int:
        _check_records(path, variables, read_seal(path, step).arrays)
        return 0

    _gather(check)
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
    return dict(zip(variables, map(stored_form, peek(list(variables.values()))), strict=True))


def _checksum(values: Mapping[str, Any]) -> int:
    """Returns a checksum that differs if processes would save different values: of the names,
    dtypes and shapes, and whether the arrays are sharded over processes; and of the bytes, if each
    of several processes has the whole array."""
    found = 0
    for name, value in values.items():
        is_whole = value.sharding.is_fully_addressable
        found = zlib.crc32(f"{name} {value.dtype} {value.shape} {is_whole}".encode(), found)
        if jax.process_count() > 1 and is_whole:
            found = zlib.crc32(np.asarray(value).tobytes(), found)
    return found


def _array_for_orbax(value: Any) -> Any:
    """Orbax writes an array that each process holds as a whole only once if it is a NumPy array."""
    return np.asarray(value) if jax.process_count() > 1 and value.is_fully_addressable else value


def _gather(work: Callable[[], int]) -> list[int]:
    """Calls `work` on all processes, and returns the results of all. If one process fails, all
    raise."""
    result, fault = 0, None
    try:
        result = work()
    except Exception as error:
        fault = error
    mine = np.array([fault is not None, result], np.uint32)
    found = multihost_utils.process_allgather(mine).tolist()
    if fault is not None:
        raise fault
    for process, (has_failed, _) in enumerate(found):
        if has_failed:
            raise RuntimeError(f"process {process} failed")
    return [each for _, each in found]


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
    return stored
