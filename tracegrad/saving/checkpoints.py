"""Checkpoints of Variables, on any number of processes: Orbax writes the files, `seal` seals them.

`seal` defines what a checkpoint is, and which checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from tracegrad import _jax
from tracegrad.ir.wording import brief, some
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.file import PathLike
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

T = TypeVar("T")

_LONGEST_TEXT = 2000  # bytes of an error that other processes show


def save_variables(tree: Any, path: PathLike) -> None:
    """Writes the values of the Variables in a tree of objects to a folder, by Orbax.

    The state is replaced atomically: if a process is killed at any time, the folder has either the
    complete old or the complete new state. Each process writes its shards of Variables that are
    sharded over several processes: call this on all processes, with a folder that all can access.
    A process waits for the others. If an error is raised on one process, it is raised on all, and
    the old state stays. If a process is killed, JAX raises an error on the others, or ends them.

    Arguments:
      tree: a tree as for `variables_of`, whose paths name the arrays.
      path: the folder; a state that was saved there before is replaced.

    Raises:
      ValueError: there is no Variable in the tree, or the processes save different Variables.
      RuntimeError: another process failed (the message says which one, and has its error); or this
        is called in a function that is being traced.
      OSError: the folder cannot be written, or another save wrote there meanwhile.
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
    folder = Path(os.path.abspath(path))

    def prepare() -> tuple[dict[str, Variable], dict[str, Any], int, int]:
        not_while_tracing("save_variables")
        variables = _require_variables(tree)
        folder.mkdir(exist_ok=True)
        values = _arrays_to_write(variables)
        return variables, values, _checksum(values), next_step(folder)

    variables, values, checksum, number = _on_all(prepare)
    if len({*_exchange(str(checksum))}) > 1:
        raise ValueError(
            "the processes want to save different Variables. All processes have to have the same "
            "Variables; a Variable that each process holds on its own devices has to have the same "
            "value on all processes"
        )
    new = step_folder(folder, int(_exchange(str(number))[0]))
    of_types = new / "array_metadatas"  # Orbax's other processes wait until process 0 makes it

    made: list[Path] = []  # `new`, unless the folder is that of another save, which goes on

    def make() -> None:
        new.mkdir()
        made.append(new)
        of_types.mkdir()

    def write() -> None:
        if not of_types.is_dir():
            raise FileNotFoundError(f"{str(new)!r} of process 0 is not there: share the folder")
        # Orbax refuses arrays without elements.
        arrays = {name: _array_for_orbax(v) for name, v in values.items() if v.size}
        with _orbax_handler() as (handler, args):
            handler.save(_orbax_path(new), args=args.StandardSave(arrays))

    def finish() -> None:
        with _orbax_handler() as (handler, _):
            handler.finalize(_orbax_path(new))
        records = {n: ArrayRecord(str(v.dtype), tuple(v.shape)) for n, v in variables.items()}
        seal(new, records, digests_of_files(new, files_of(new)))

    try:
        _on_first(make)
        _on_all(write)
        _on_first(finish)
    except BaseException:
        if not (new / SEAL).exists():  # once the new state has a seal, the old state may be gone
            remove(made)
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
      RuntimeError: another process failed; the message says which one, and has its error.
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
    folder = Path(os.path.abspath(path))

    def prepare() -> tuple[dict[str, Variable], int]:
        variables = _require_variables(tree)
        check_width({str(each.dtype) for each in variables.values()}, "the Variables are of")
        return variables, last_sealed(folder)

    variables, number = _on_all(prepare)
    step = step_folder(folder, int(_exchange(str(number))[0]))

    def read() -> dict[str, Any]:
        _check_records(path, variables, read_seal(step).arrays)
        return _read_checkpoint(step, variables)

    for name, value in _on_all(read).items():
        variables[name].assign(value)


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


@contextlib.contextmanager
def _orbax_handler() -> Iterator[tuple[Any, Any]]:
    """Yields the handler of `StandardCheckpointer`, and Orbax's arguments.

    The checkpointer itself waits for all processes in collectives: if a process failed between
    them, JAX would end the others. The handler waits for no process.
    """
    orbax = needed("orbax.checkpoint")
    with contextlib.closing(orbax.StandardCheckpointHandler()) as handler:
        yield handler, orbax.args


def _orbax_path(step: Path) -> Any:
    return needed("etils.epath").Path(step)


# ------------------------------------------------------------------------------------- processes


def _on_all(work: Callable[[], T]) -> T:
    """Returns the result of `work`, if `work` returns on every process.

    All processes have to call this. If `work` raises an error on some, each of these raises its own
    error, and the others raise RuntimeError with the error of the first. `work` must not wait for
    another process.
    """
    try:
        result = work()
    except BaseException as error:
        _exchange(f"{type(error).__name__}: {error}")
        raise
    for process, failure in enumerate(_exchange("")):
        if failure:
            raise RuntimeError(f"process {process} failed: {failure}")
    return result


def _on_first(work: Callable[[], None]) -> None:
    """Calls `work` on process 0 only. All processes have to call this, as for `_on_all`."""
    _on_all(lambda: work() if jax.process_index() == 0 else None)


def _exchange(text: str) -> list[str]:
    """Returns the texts of all processes, in the order of the processes."""
    mine = np.zeros(_LONGEST_TEXT, np.uint8)
    encoded = np.frombuffer(text.encode(errors="replace")[:_LONGEST_TEXT], np.uint8)
    mine[: encoded.size] = encoded
    with _jax.at_top_level():
        found = multihost_utils.process_allgather(mine)
    return [each.tobytes().rstrip(b"\0").decode(errors="replace") for each in found]


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
            raise ValueError(
                f"{what} has the shape {list(record.shape)}, but {variable!r} has {shape}"
            )
        if record.dtype != str(variable.dtype):
            dtype = variable.dtype
            raise TypeError(f"{what} has the dtype {record.dtype}, but {variable!r} has {dtype}")


def _read_checkpoint(step: Path, variables: Mapping[str, Variable]) -> dict[str, Any]:
    """Returns the values of a checkpoint, where the Variables have their present values."""
    present = dict(zip(variables, peek(list(variables.values())), strict=True))
    forms = {name: stored_form(value) for name, value in present.items()}

    def template_of(form: Any) -> Any:
        sharding = _present_sharding(form)
        if sharding is None or (jax.process_count() > 1 and sharding.is_fully_addressable):
            return np.empty(form.shape, form.dtype)
        return jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=sharding)  # type: ignore[no-untyped-call]

    template = {name: template_of(form) for name, form in forms.items() if form.size}
    try:
        with _orbax_handler() as (handler, args):
            arrays: dict[str, Any] = handler.restore(
                _orbax_path(step), args=args.StandardRestore(template)
            )
    except Exception as error:
        raise ArtefactError("checkpoint", f"Orbax cannot read it: {error}", step) from error
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):  # this process holds it alone
            array = jax.device_put(array, _present_sharding(forms[name]))
        if is_key(present[name]):
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(present[name]))
        arrays[name] = array
    return arrays
