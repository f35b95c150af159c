"""`load` reads a file of `save`, and returns functions that need none of the original code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.export

from tracegrad import _jax
from tracegrad.ir.wording import first_line
from tracegrad.saving import outside_calls
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.file import Contents, array_of, read_file
from tracegrad.saving.libraries import needed
from tracegrad.saving.loaded import LoadedFunction
from tracegrad.saving.manifest import VariableRecord
from tracegrad.saving.variables import check_width
from tracegrad.variables.variable import Variable


def load(path: str | os.PathLike[str]) -> Any:
    """Reads a file that `save` wrote. No program of the file runs before its function is called.

    Arguments:
      path: the file.

    Returns:
      A `LoadedFunction`; a dictionary of them if several functions were saved. The Variables are on
      the default device; ``variable.assign(jax.device_put(variable.value, sharding))`` shards one.

    Raises:
      ArtefactError: the file is damaged, `save` did not write it, or this version of JAX cannot
        read a program in it; then the message names the versions of JAX that wrote and that read
        the file. The checksums show damage, not malice: load only files that you trust.
      OSError: the file does not exist or cannot be read.
      ValueError: the functions compute with 64 bits, but JAX is set to 32 bits.
      ImportError: a package is missing: ``pip install 'tracegrad[save]'``.

    >>> import os, tempfile
    >>> import jax.numpy as jnp, tracegrad as tg
    >>> path = os.path.join(tempfile.mkdtemp(), "twice.tracegrad")
    >>> tg.save(lambda x: 2 * x, path, [jnp.ones(2)], gradient_order=0)
    >>> print(tg.load(path)(jnp.ones(2)))
    [2. 2.]

    It corresponds to ``tf.saved_model.load``.
    """
    needed("flatbuffers")  # jax.export needs it
    with _jax.at_top_level():  # also if `load` is called inside of a trace
        contents = read_file(path)
        manifest = contents.manifest
        if not manifest.functions:
            raise ArtefactError("manifest", "it lists no functions", path)
        exported = {
            name: _read_program(contents, name, calls)
            for record in manifest.functions
            for name, calls in record.calls.items()
        }
        _check_width(contents, exported)
        variables = {v.key: _read_variable(v, contents) for v in manifest.variables}
        shared = list(variables.items())
        functions = {}
        for record in manifest.functions:
            try:
                functions[record.name] = LoadedFunction(record, exported, shared)
            except Exception as error:
                reason = f"the record of the function {record.name!r} is inconsistent: {error!r}"
                raise ArtefactError("manifest", reason, path) from error
    return functions[manifest.functions[0].name] if manifest.single else functions


def _check_width(contents: Contents, exported: Mapping[str, Any]) -> None:
    avals = [aval for each in exported.values() for aval in (*each.in_avals, *each.out_avals)]
    dtypes = {str(aval.dtype) for aval in avals}
    dtypes.update(variable.array.dtype for variable in contents.manifest.variables)
    check_width(dtypes, "the saved functions compute with")


def _read_variable(record: VariableRecord, contents: Contents) -> Variable:
    array, of_keys = record.array, record.key_type is not None
    try:
        dtype, shape = ("uint32", (*array.shape, -1)) if of_keys else (array.dtype, array.shape)
        stored = array_of(contents.arrays[record.key], dtype, shape)
    except Exception as error:
        reason = f"it is not an array {array.dtype}{list(array.shape)}: {error}"
        raise ArtefactError(record.key, reason, contents.path) from error
    value = jax.device_put(stored)  # which may share the memory
    if of_keys:
        try:
            value = jax.random.wrap_key_data(value, impl=record.key_type)
        except Exception as error:
            kind = record.key_type
            reason = f"the Variable {record.key!r} cannot have random keys of {kind!r}: {error}"
            raise ArtefactError("manifest", reason, contents.path) from error
    return Variable(value, trainable=record.trainable, name=record.name)


def _read_program(contents: Contents, name: str, calls: tuple[str, ...]) -> Any:
    """Deserialises a program; compiles and runs nothing.

    Raises ArtefactError if XLA cannot parse the program, or if the program makes a custom call of
    XLA that is not allowed or that the manifest does not list.
    """
    try:
        exported = jax.export.deserialize(bytearray(contents.arrays[name]))
        found = _jax.outside_calls(exported)
    except Exception as error:
        reason = first_line(error)[:200].rstrip(" .:")
        versions = contents.manifest.versions
        raise ArtefactError(
            name,
            f"it was written by tracegrad {versions.get('tracegrad')} with JAX "
            f"{versions.get('jax')}, and JAX {_jax.versions()['jax']}, which runs here, cannot "
            f"read it: {reason}. A newer JAX reads the programs of an older JAX, but an older JAX "
            "may fail to read the programs of a newer JAX: load the file with the JAX that wrote "
            "it, or with a newer JAX",
            contents.path,
        ) from error
    if (unknown := outside_calls.unknown(found)) is not None:
        raise ArtefactError(
            name,
            f"it calls {unknown!r} by a custom call of XLA, which could be any code of the process "
            "that loads it: `save` writes no call of this name",
            contents.path,
        )
    if found != list(calls):
        reason = f"it calls {found}, but the manifest lists {list(calls)}"
        raise ArtefactError(name, reason, contents.path)
    return exported
