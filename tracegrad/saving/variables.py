"""The Variables of an object tree to and from a safetensors file, without the functions.

For checkpoints, and for exchanging weights with other programs: the file is an ordinary one of its
format, which a hundred tools read. What `save` writes is one too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import jax
import numpy as np

from tracegrad.saving.atomic import replacing
from tracegrad.saving.container import map_file, naming
from tracegrad.saving.structure import is_namedtuple
from tracegrad.saving.tensors import bytes_of, header_of, in_order, read_tensors
from tracegrad.tracing import TracedFunction
from tracegrad.tracing.traced import BoundTracedFunction
from tracegrad.variables.lending import peek
from tracegrad.variables.variable import Variable

Path = str | os.PathLike[str]

# Objects of these hold no Variables of the user's.
_CLOSED = (
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, str, bytes, np.ndarray),
    *(TracedFunction, BoundTracedFunction),
)
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
    elif not isinstance(item, _CLOSED):
        # What the object holds, not what its class computes: a property may well ask for this.
        held = getattr(item, "__dict__", {})
        if isinstance(held.get("variables"), MappingProxyType):  # a loaded function
            yield from held["variables"].items()
        elif kind.__module__.split(".")[0] not in _CLOSED_PACKAGES:
            slots = (slot for base in kind.__mro__ for slot in _slots(base, item))
            yield from {**held, **dict(slots)}.items()


def _slots(kind: type, item: Any) -> Iterator[tuple[str, Any]]:
    """What an object has in the slots of one of its classes."""
    slots = kind.__dict__.get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        is_private = name.startswith("__") and not name.endswith("__")
        member = kind.__dict__.get(f"_{kind.__name__.lstrip('_')}{name}" if is_private else name)
        if isinstance(member, MemberDescriptorType):
            with suppress(AttributeError):  # not set
                yield name, member.__get__(item)


def save_variables(tree: Any, path: Path) -> None:
    """Writes the values of the Variables in a tree of objects to a safetensors file.

    Arguments:
      tree: as of `variables_of`, whose paths name the arrays. Random keys are written as their
        words, ``u32[..., words]``.
      path: the file; it is replaced in one step.

    Raises:
      ValueError: there is no Variable in the tree, or one is spread over several processes.
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
    variables = _some(tree)
    values = peek(list(variables.values()))
    arrays = {
        name: array_of(variable.name, value)
        for (name, variable), value in zip(variables.items(), values, strict=True)
    }
    arrays = in_order(arrays)
    header = header_of(arrays, {})
    with replacing(path) as file:
        file.write(header)
        for array in arrays.values():
            file.write(bytes_of(array))


def load_variables(tree: Any, path: Path) -> None:
    """Assigns to the Variables in a tree of objects what is in a safetensors file.

    Nothing is assigned unless all of it fits.

    Arguments:
      tree: as of `variables_of`.
      path: a file by `save_variables`, or of any program that writes the format, with an array for
        each Variable, called by its path.

    Raises:
      ArtefactError: the file is damaged, or none of the format.
      ValueError: an array is missing, or there is one too many, or one of another shape.
      TypeError: one of another dtype.
      OSError: there is no such file, or it may not be read.

    See `save_variables` for an example.
    """
    variables = _some(tree)
    shown = os.fspath(path)
    with naming(shown):
        arrays = read_tensors(map_file(shown))
    missing = [name for name in variables if name not in arrays]
    more = [name for name in arrays if name not in variables]
    if missing or more:
        raise ValueError(
            f"{shown} has not the arrays of these Variables: "
            + "; ".join(
                f"{what} {', '.join(map(repr, names[:5]))}{' ...' if len(names) > 5 else ''}"
                for what, names in (("missing", missing), ("too many", more))
                if names
            )
        )
    values = [
        _value_for(variable, arrays[name], f"the array {name!r} of {shown}")
        for name, variable in variables.items()
    ]
    for variable, value in zip(variables.values(), values, strict=True):
        variable.assign(value)


def _some(tree: Any) -> dict[str, Variable]:
    variables = variables_of(tree)
    if not variables:
        raise ValueError(f"there is no Variable in {tree!r} of type {type(tree).__name__}")
    return variables


def is_key(variable: Variable) -> bool:
    """Whether a Variable holds random keys."""
    return bool(jax.numpy.issubdtype(variable.dtype, jax.dtypes.prng_key))


def array_of(name: str, value: Any) -> np.ndarray[Any, Any]:
    """The value of a Variable in NumPy, on the CPU without a copy; of random keys their words."""
    if not value.is_fully_addressable:
        raise ValueError(
            f"the Variable {name!r} is spread over several processes, of which this one "
            "holds a part: gather it first, with jax.experimental.multihost_utils"
        )
    is_words = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_words else value)


def own_copy(array: np.ndarray[Any, Any]) -> Any:
    """An array of JAX's with a buffer of its own: files can change under the map of their bytes,
    and the buffer of a Variable may be donated."""
    return jax.device_put(array, may_alias=False)


def _value_for(variable: Variable, array: np.ndarray[Any, Any], what: str) -> Any:
    shape, dtype = variable.shape, variable.dtype
    if is_key(variable):
        words = jax.random.key_data(peek([variable])[0])
        shape, dtype = words.shape, words.dtype
    if array.shape != shape:
        raise ValueError(f"{what} has the shape {list(array.shape)}, {variable!r} {list(shape)}")
    if array.dtype != dtype:
        raise TypeError(f"{what} has the dtype {array.dtype}, {variable!r} {dtype}")
    value = own_copy(array)
    if not is_key(variable):
        return value
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(peek([variable])[0]))
