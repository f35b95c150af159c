"""`load`: a file that `save` wrote → functions which run and are differentiated without code."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir.wording import first_line
from tracegrad.saving import dimensions, documents, outside_calls, program
from tracegrad.saving.container import MANIFEST, Container, open_container
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.loaded import LoadedFunction, LoadedFunctions
from tracegrad.saving.manifest import FunctionRecord, Manifest, VariableRecord, manifest_of
from tracegrad.saving.placement import asked_for, where_it_was
from tracegrad.saving.program_tree import ProgramTree, gets_gradient, has_cotangent, has_flags
from tracegrad.saving.stored import StoredArray
from tracegrad.saving.structure import Leaf, leaf_of
from tracegrad.saving.tensors import Array
from tracegrad.variables.variable import Variable

_WIDE = frozenset({"float64", "int64", "uint64", "complex128"})


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
    program.check_installed()
    with open_container(path) as container, _jax.at_top_level():  # wherever it is called
        return load_container(container, sharding)


def load_container(container: Container, sharding: Any = None) -> Any:
    """What `load` returns, of an open file."""
    manifest = manifest_of(container)
    _check_width(manifest)
    variables = {
        record.key: _variable(record, container.array(record.key), sharding)
        for record in manifest.variables
    }
    functions = {
        record.name: _function(container, manifest, record, variables)
        for record in manifest.functions
    }
    if manifest.single:
        (function,) = functions.values()
        return function
    return LoadedFunctions(functions, variables)


def _check_width(manifest: Manifest) -> None:
    if jnp.result_type(float) == jnp.float64:  # JAX is set to 64 bits
        return
    leaves = [
        leaf.dtype
        for record in manifest.functions
        for leaf in jax.tree.leaves((record.arguments, record.result))
    ]
    wide = sorted(_WIDE & {*leaves, *(record.dtype for record in manifest.variables)})
    if wide:
        raise ValueError(
            f"the saved functions compute with {', '.join(wide)}, and JAX is set to 32 bits: "
            'call jax.config.update("jax_enable_x64", True) before'
        )


def _variable(record: VariableRecord, array: Array, sharding: Any) -> Variable:
    # Compared as it is stored: JAX would convert 64 bits to 32.
    if record.key_type is None and array.dtype.name != record.dtype:
        raise _another(record, array)
    what, of_keys = f"the Variable {record.key!r}", record.key_type is not None
    asked = asked_for(sharding, record.key, what, of_keys=of_keys)
    value = StoredArray.of(array).on(asked or where_it_was(record.placement, what), what)
    if record.key_type is not None:
        try:
            value = jax.random.wrap_key_data(value, impl=record.key_type)
        except Exception as error:
            kind = documents.show(record.key_type)
            reason = f"it holds no random keys of the kind {kind}: {error}"
            raise ArtefactError(record.key, reason) from None
    if str(value.dtype) != record.dtype or value.shape != record.shape:
        raise _another(record, value)
    return Variable(value, trainable=record.trainable, name=record.name)


def _another(record: VariableRecord, value: Any) -> ArtefactError:
    wanted = f"{documents.show(record.dtype)[1:-1]}{list(record.shape)}"
    return ArtefactError(
        record.key, f"it is {value.dtype}{list(value.shape)}, the manifest says {wanted}"
    )


def _function(
    container: Container,
    manifest: Manifest,
    record: FunctionRecord,
    variables: Mapping[str, Variable],
) -> LoadedFunction:
    contents = [bytes(container.bytes(name)) for name in record.programs]
    read = [read_program(record, k, each, manifest) for k, each in enumerate(contents)]
    _check_function(record, read, list(variables.values()))
    for constraint in record.constraints:
        if (why := dimensions.why_no_constraint(constraint)) is not None:
            reason = f"the constraint {documents.show(constraint)} is none: {why}"
            raise ArtefactError(MANIFEST, reason)
    tree, text = record.tree.map(read.__getitem__), graph_text(container, record)
    return LoadedFunction(record, contents, tree, text, variables)


def graph_text(container: Container, record: FunctionRecord) -> str:
    """The text of a function's Graph."""
    try:
        return bytes(container.bytes(record.graph)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtefactError(record.graph, f"it is no text in UTF-8: {error}") from None


def read_program(record: FunctionRecord, place: int, contents: bytes, manifest: Manifest) -> Any:
    """The `jax.export.Exported` of one of the programs of a function, which XLA can parse, and
    which calls nothing outside of it but what the manifest says and may be called."""
    name = record.programs[place]
    try:
        exported = jax.export.deserialize(bytearray(contents))  # compiles and runs nothing
        calls = _jax.outside_calls(exported)
    except Exception as error:
        reason = first_line(error)[:200].rstrip(" .:")
        raise ArtefactError(
            name,
            f"it was written by {manifest.versions}, and JAX {_jax.versions()['jax']}, which runs "
            f"here, cannot read it: {reason}. A newer JAX reads what an older one wrote; the other "
            "way it may fail: load it with the version that wrote it, or a newer one",
        ) from error
    if (unknown := outside_calls.unknown(calls)) is not None:
        raise ArtefactError(
            name,
            f"it calls {documents.show(unknown)} by a custom call of XLA, which could be any code "
            "of the process that loads it: none of the calls that `save` writes is of this name",
        )
    if calls != list(record.calls[place]):
        reason = f"it calls {calls}, and by the manifest {list(record.calls[place])}"
        raise ArtefactError(name, reason)
    return exported


# -------------------------------------------------------------------- whether programs fit together


Types = Sequence[Leaf]


def _check_function(
    record: FunctionRecord, read: Sequence[Any], variables: Sequence[Variable]
) -> None:
    """The programs of a function take and return what the manifest says."""
    operands = jax.tree.leaves(record.arguments) + [leaf_of(variables[i]) for i in record.reads]
    results = jax.tree.leaves(record.result) + [leaf_of(variables[i]) for i in record.assigns]
    assigned, order = len(record.assigns), record.gradient_order
    _check_tree(record, read, record.tree, operands, results, assigned, order)


def _check_tree(
    function: FunctionRecord,
    read: Sequence[Any],
    tree: ProgramTree[int],
    operands: Types,
    results: Types,
    assigned: int,
    left: int,
) -> None:
    """A program takes and returns arrays of these types; those below it, of `left` orders, are
    there and fit it."""
    name, exported = function.programs[tree.program], read[tree.program]
    ins, outs = exported.in_avals, exported.out_avals
    _compare(name, "operand", operands, ins)
    _compare(name, "result", results, outs)
    flat = jax.tree.structure(((0,) * len(ins), {})), jax.tree.structure([0] * len(outs))
    if (exported.in_tree, exported.out_tree) != flat:
        raise ArtefactError(name, "it takes or returns a tree, where arrays should be")
    if exported.ordered_effects or exported.unordered_effects:
        raise ArtefactError(name, "it has effects, which no saved program has")
    if tuple(exported.platforms) != function.platforms:
        platforms = f"{list(exported.platforms)}, and not {list(function.platforms)}"
        raise ArtefactError(name, f"it is for {platforms}")
    named = [*(i for row in tree.connected for i in row), *(i for i, _ in tree.refused)]
    if len(tree.connected) != len(outs) or any(i >= len(ins) for i in named):
        reason = f"what is connected in {name} does not fit its operands and results"
        raise ArtefactError(MANIFEST, reason)
    flowing, active = has_cotangent(outs, assigned), gets_gradient(ins, tree.refused)
    if (tree.gradient is None) == bool(left and flowing and active):
        fault = "has no gradient" if tree.gradient is None else "has a gradient too many"
        order = f"{function.name} can be differentiated {function.gradient_order} times"
        raise ArtefactError(MANIFEST, f"{name} {fault}, where {order}")
    operands, results = list(map(leaf_of, ins)), list(map(leaf_of, outs))
    if tree.value is not None:
        _check_tree(function, read, tree.value, operands, results, assigned, left - 1)
    if tree.gradient is not None:
        given = [*operands, *(results[j] for j in flowing)]
        if has_flags(ins, read[tree.gradient.program].in_avals, len(flowing)):
            given += [Leaf("bool", ())] * len(flowing)
        gradients = [operands[i] for i in active]
        _check_tree(function, read, tree.gradient, given, gradients, 0, left - 1)


def _compare(name: str, what: str, types: Types, avals: Sequence[Any]) -> None:
    if len(types) != len(avals):
        wanted = f"{len(types)} should be, by the manifest"
        raise ArtefactError(name, f"it has {len(avals)} {what}s where {wanted}")
    for i, (wanted_type, found) in enumerate(zip(types, map(leaf_of, avals), strict=True)):
        # Versions of JAX may write the same symbolic size differently.
        fits = len(wanted_type.shape) == len(found.shape) and all(
            a == b if isinstance(b, int) else not isinstance(a, int)
            for a, b in zip(wanted_type.shape, found.shape, strict=True)
        )
        if found.dtype != wanted_type.dtype or not fits:
            reason = f"its {what} {i} is {found} and should be {wanted_type}"
            raise ArtefactError(name, reason)
