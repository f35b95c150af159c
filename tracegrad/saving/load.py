"""`load`: a file that `save` wrote → functions which run and are differentiated without code."""

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
from tracegrad.saving.file import Contents, array_of, naming, read_file
from tracegrad.saving.libraries import needed
from tracegrad.saving.loaded import LoadedFunction, LoadedFunctions
from tracegrad.saving.manifest import FunctionRecord, VariableRecord
from tracegrad.saving.placement import asked_for, on, where_it_was
from tracegrad.saving.variables import check_width
from tracegrad.variables.variable import Variable


def load(path: str | os.PathLike[str], *, sharding: Any = None) -> Any:
    """Reads what `save` wrote; nothing of it is executed before it is called.

    Arguments:
      path: the file.
      sharding: how the Variables shall lie on devices, as of `load_variables`. Default: as they
        were when they were saved, where a mesh is set.

    Returns:
      A `LoadedFunction`, or for several functions `LoadedFunctions`.

    Raises:
      ArtefactError: the file is damaged, or none that `save` wrote, or the JAX that runs cannot
        read what the one that wrote it has written; then both versions are named. Its checksums
        show damage, not malice: load files that you trust.
      OSError: there is no such file, or it may not be read.
      ValueError: the functions compute with 64 bits, and JAX is not set to; the mesh that is set
        has not the axes along which a Variable was or shall be split.
      ImportError: a package is missing: ``pip install 'tracegrad[save]'``.

    >>> import os, tempfile
    >>> import jax.numpy as jnp, tracegrad as tg
    >>> path = os.path.join(tempfile.mkdtemp(), "twice.tracegrad")
    >>> tg.save(lambda x: 2 * x, path, [jnp.ones(2)], gradient_order=0)
    >>> print(tg.load(path)(jnp.ones(2)))
    [2. 2.]

    As ``tf.saved_model.load``.
    """
    needed("flatbuffers")  # jax.export does
    with naming(path), _jax.at_top_level():  # wherever it is called
        contents = read_file(path)
        manifest = contents.manifest
        exported = {
            name: _exported(contents, name, calls)
            for record in manifest.functions
            for name, calls in record.calls.items()
        }
        _check_width(contents, exported)
        variables = {v.key: _variable(v, contents, sharding) for v in manifest.variables}
        functions = {
            f.name: _function(f, contents, exported, variables) for f in manifest.functions
        }
    if manifest.single:
        return functions[manifest.functions[0].name]
    return LoadedFunctions(functions, variables)


def _check_width(contents: Contents, exported: Mapping[str, Any]) -> None:
    avals = [aval for each in exported.values() for aval in (*each.in_avals, *each.out_avals)]
    dtypes = {str(aval.dtype) for aval in avals}
    dtypes.update(variable.array.dtype for variable in contents.manifest.variables)
    check_width(dtypes, "the saved functions compute with")


def _variable(record: VariableRecord, contents: Contents, sharding: Any) -> Variable:
    what, of_keys = f"the Variable {record.key!r}", record.key_type is not None
    asked = asked_for(sharding, record.key, what, of_keys=of_keys)
    array = record.array
    try:
        dtype, shape = ("uint32", (*array.shape, -1)) if of_keys else (array.dtype, array.shape)
        stored = array_of(contents.arrays[record.key], dtype, shape)
    except Exception as error:
        reason = f"it is no array {array.dtype}{list(array.shape)}: {error}"
        raise ArtefactError(record.key, reason) from error
    value = on(stored, asked or where_it_was(array.placement, what), what)
    if of_keys:
        try:
            value = jax.random.wrap_key_data(value, impl=record.key_type)
        except Exception as error:
            reason = f"{what} can have no random keys of {record.key_type!r}: {error}"
            raise ArtefactError("manifest", reason) from error
    return Variable(value, trainable=record.trainable, name=record.name)


def _exported(contents: Contents, name: str, calls: tuple[str, ...]) -> Any:
    """The `jax.export.Exported` of a program, which XLA can parse, and which calls nothing outside
    of it but what the manifest says and may be called. Nothing is compiled or run."""
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
            f"read it: {reason}. A newer JAX reads what an older one wrote; the other way it may "
            "fail: load it with the version that wrote it, or a newer one",
        ) from error
    if (unknown := outside_calls.unknown(found)) is not None:
        raise ArtefactError(
            name,
            f"it calls {unknown!r} by a custom call of XLA, which could be any code of the process "
            "that loads it: none of the calls that `save` writes is of this name",
        )
    if found != list(calls):
        raise ArtefactError(name, f"it calls {found}, and by the manifest {list(calls)}")
    return exported


def _function(
    record: FunctionRecord,
    contents: Contents,
    exported: Mapping[str, Any],
    variables: Mapping[str, Variable],
) -> LoadedFunction:
    try:
        programs = {name: contents.arrays[name] for name in record.calls}
        text = bytes(contents.arrays[record.graph]).decode()
        return LoadedFunction(record, programs, exported, text, list(variables.items()))
    except Exception as error:
        reason = f"what it says of {record.name!r} does not fit together: {error!r}"
        raise ArtefactError("manifest", reason) from error
