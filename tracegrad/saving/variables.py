"""The Variables of an object tree to and from a safetensors file, without the functions.

For checkpoints, and for exchanging weights with other programs: the file is an ordinary one of its
format, which a hundred tools read. What `save` writes is one too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MemberDescriptorType, ModuleType
from typing import Any

import jax
import numpy as np

from tracegrad.ir.wording import some
from tracegrad.saving import documents
from tracegrad.saving.atomic import replacing
from tracegrad.saving.container import map_file, naming
from tracegrad.saving.loaded import LoadedFunction
from tracegrad.saving.parts import names_parts, parts_named_by, read_parts, remove, write_parts
from tracegrad.saving.placement import Placement, asked_for, placement_of, where_it_was
from tracegrad.saving.stored import StoredArray
from tracegrad.saving.structure import is_namedtuple
from tracegrad.saving.tensors import (
    Array,
    bytes_of,
    header_of,
    in_order,
    read_header,
    read_tensor,
)
from tracegrad.tracing import TracedFunction
from tracegrad.tracing.traced import BoundTracedFunction
from tracegrad.variables.lending import peek
from tracegrad.variables.variable import Variable

Path = str | os.PathLike[str]

_PLACEMENTS = "tracegrad.placements"  # in the metadata: how arrays were split, as JSON

# Objects of these hold no Variables of the user's.
_CLOSED = (type, ModuleType, str, bytes, np.ndarray, TracedFunction, BoundTracedFunction)
_CLOSED_PACKAGES = frozenset({"builtins", "jax", "jaxlib", "numpy"})


def variables_of(tree: Any) -> dict[str, Variable]:
    """The Variables in a tree of objects, by their path: ``layers.0.weight``.

    Arguments:
      tree: dictionaries, lists, tuples, and objects, whose attributes are looked through; or a
        loaded function. A Variable that is met again is listed where it was met first.

    >>> from tracegrad import Variable
    >>> class Layer:
    ...     def __init__(self):
    ...         self.weight = Variable([1.0, 2.0])
    >>> list(variables_of({"layers": [Layer(), Layer()], "step": Variable(0)}))
    ['layers.0.weight', 'layers.1.weight', 'step']
    """
    found: dict[str, Variable] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", tree)]
    while waiting:
        path, item = waiting.pop()
        if id(item) in seen:
            continue
        if isinstance(item, Variable):
            seen.add(id(item))
            found[path or item.name] = item
            continue
        below = list(_parts(item))
        if below:
            seen.add(id(item))
        prefix = f"{path}." if path else ""
        waiting += [(f"{prefix}{name}", part) for name, part in reversed(below)]
    return found


def _parts(item: Any) -> Iterator[tuple[Any, Any]]:
    """What is directly in an object, by name."""
    kind = type(item)
    if isinstance(item, Mapping):
        yield from item.items()
    elif is_namedtuple(kind):
        yield from zip(item._fields, item, strict=True)
    elif isinstance(item, (list, tuple)):
        yield from enumerate(item)
    elif isinstance(item, LoadedFunction):
        yield from item.variables.items()
    elif not isinstance(item, _CLOSED) and kind.__module__.split(".")[0] not in _CLOSED_PACKAGES:
        # What the object holds, not what its class computes: a property may well ask for this.
        slots = (slot for base in kind.__mro__ for slot in _slots(base, item))
        yield from {**getattr(item, "__dict__", {}), **dict(slots)}.items()


def _slots(kind: type, item: Any) -> Iterator[tuple[str, Any]]:
    """What an object has in the slots of one of its classes."""
    slots = kind.__dict__.get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        is_private = name.startswith("__") and not name.endswith("__")
        member = kind.__dict__.get(f"_{kind.__name__.lstrip('_')}{name}" if is_private else name)
        if isinstance(member, MemberDescriptorType):
            with suppress(AttributeError):  # not set
                yield name, member.__get__(item)


def save_variables(tree: Any, path: Path, *, timeout: float = 600.0) -> None:
    """Writes the values of the Variables in a tree of objects to a safetensors file.

    Arguments:
      tree: as of `variables_of`, whose paths name the arrays. Random keys are written as their
        words, ``u32[..., words]``.
      path: the file; it is replaced in one step.
      timeout: how long to wait for another process, in seconds.

    Of Variables that are spread over several processes each writes its part, to a file beside
    `path`, in a folder that all see, and `path` names the parts: call it on all processes. Whenever
    any of them is killed, the old state is there, or the new one, whole.

    Raises:
      ValueError: there is no Variable in the tree, or the processes have not the same.
      TimeoutError: some processes did not call this; it names them.
      RuntimeError: another process failed.
      OSError: the file cannot be written; nothing is left behind then.

    >>> import os, tempfile
    >>> from tracegrad import Variable
    >>> path = os.path.join(tempfile.mkdtemp(), "weights.safetensors")
    >>> weights = {"w": Variable([1.0, 2.0]), "b": Variable(0.5)}
    >>> save_variables(weights, path)
    >>> weights["w"].assign([0.0, 0.0])
    <Variable Variable: f32[2] = [0. 0.]>
    >>> load_variables(weights, path)
    >>> weights["w"]
    <Variable Variable: f32[2] = [1. 2.]>
    """
    variables, path = _some(tree), os.fspath(path)
    values = dict(zip(variables, map(stored_form, peek(list(variables.values()))), strict=True))
    if not all(value.is_fully_addressable for value in values.values()):
        write_parts(path, values, timeout)
        return
    placements = {
        name: placement
        for name, value in values.items()
        if (placement := placement_of(value.sharding)) is not None
    }
    metadata = {_PLACEMENTS: documents.write(placements)} if placements else {}
    arrays = in_order({name: np.asarray(value) for name, value in values.items()})
    header = header_of(arrays, metadata)
    replaced = parts_named_by(path)
    with replacing(path) as file:
        file.write(header)
        for array in arrays.values():
            file.write(bytes_of(array))
    remove(replaced)


def load_variables(tree: Any, path: Path, *, sharding: Any = None) -> None:
    """Assigns to the Variables in a tree of objects what is in a safetensors file.

    Nothing is assigned unless all of it fits. What was written by any number of processes, on any
    mesh, is read by any other; each process reads what its devices get.

    Arguments:
      tree: as of `variables_of`.
      path: a file by `save_variables`, or of any program that writes the format, with an array for
        each Variable, called by its path.
      sharding: how the Variables shall lie on devices: a `jax.sharding.Sharding`, or a
        `PartitionSpec` on the mesh that is set, or a dictionary of these by the Variables' paths.
        Default, and for those that are not in the dictionary: as the Variable is; one that was
        never put on any device as the saved one was, where a mesh is set.

    Raises:
      ArtefactError: a file is damaged, none of the format, or missing, or of another run.
      ValueError: an array is missing, or there is one too many, or one of another shape, or the
        mesh that is set has not the axes along which it was or shall be split.
      TypeError: one of another dtype.
      OSError: there is no such file, or it may not be read.

    >>> import os, tempfile
    >>> import jax.numpy as jnp
    >>> from safetensors.numpy import save_file
    >>> from tracegrad import Variable
    >>> path = os.path.join(tempfile.mkdtemp(), "weights.safetensors")
    >>> save_file({"w": np.ones(2, np.float32)}, path)
    >>> weights = {"w": Variable([0.0, 0.0])}
    >>> load_variables(weights, path)
    >>> print(weights["w"].value)
    [1. 1.]
    """
    variables = _some(tree)
    shown = os.fspath(path)
    with naming(shown):
        arrays = _arrays_in(shown)
    missing = [repr(name) for name in variables if name not in arrays]
    more = [repr(name) for name in arrays if name not in variables]
    if missing or more:
        raise ValueError(
            f"{shown} has not the arrays of these Variables: "
            + "; ".join(
                f"{what} {some(names, 5)}"
                for what, names in (("missing", missing), ("too many", more))
                if names
            )
        )
    values = [
        _value_for(
            variable,
            arrays[name],
            asked_for(sharding, name, f"the Variable {name!r}", of_keys=is_key(variable)),
            f"the array {name!r} of {shown}",
        )
        for name, variable in variables.items()
    ]
    for variable, value in zip(variables.values(), values, strict=True):
        variable.assign(value)


def _arrays_in(path: str) -> dict[str, StoredArray]:
    view = map_file(path)
    header = read_header(view)
    if names_parts(header.tensors):
        return read_parts(path)
    text = header.metadata.get(_PLACEMENTS, "{}").encode("utf-8")
    document = documents.read(text, _PLACEMENTS, most=2 * len(view))
    placements = documents.parse(dict[str, Placement], document, _PLACEMENTS)
    return {
        name: StoredArray.of(read_tensor(view, name, tensor), placements.get(name))
        for name, tensor in header.tensors.items()
    }


def _some(tree: Any) -> dict[str, Variable]:
    variables = variables_of(tree)
    if not variables:
        raise ValueError(f"there is no Variable in {tree!r} of type {type(tree).__name__}")
    return variables


def is_key(holder: Any) -> bool:
    """Whether a Variable, or an array, holds random keys."""
    return bool(jax.numpy.issubdtype(holder.dtype, jax.dtypes.prng_key))


def stored_form(value: Any) -> Any:
    """The array that is written of a Variable's value: of random keys their words."""
    return jax.random.key_data(value) if is_key(value) else value


def array_of(name: str, value: Any) -> Array:
    """The value of a Variable in NumPy, on the CPU without a copy; of random keys their words."""
    if not value.is_fully_addressable:
        raise ValueError(
            f"the Variable {name!r} is spread over several processes, of which this one holds a "
            "part, and a function is written by one process, with all of its Variables. Write "
            "these with save_variables, on all processes; load them on one, and save the function "
            "there"
        )
    return np.asarray(stored_form(value))


def _value_for(variable: Variable, stored: StoredArray, sharding: Any, what: str) -> Any:
    (own,) = peek([variable])
    form = stored_form(own)
    if stored.shape != form.shape:
        raise ValueError(
            f"{what} has the shape {list(stored.shape)}, {variable!r} {list(form.shape)}"
        )
    if stored.dtype != form.dtype:
        raise TypeError(f"{what} has the dtype {stored.dtype}, {variable!r} {form.dtype}")
    if sharding is None:
        is_placed = own.committed or len(own.sharding.device_set) > 1
        sharding = form.sharding if is_placed else where_it_was(stored.placement, what)
    value = stored.on(sharding, what)
    if not is_key(variable):
        return value
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(own))
