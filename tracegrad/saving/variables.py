"""Finds the Variables in a tree of objects, and the arrays to write for their values."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Set
from types import MemberDescriptorType, ModuleType
from typing import Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad.saving.loaded import LoadedFunction
from tracegrad.tracing import TracedFunction
from tracegrad.variables.variable import Variable

# Objects of these types and packages are not searched for Variables.
_CLOSED = (type, ModuleType, str, bytes, np.ndarray, TracedFunction)
_CLOSED_PACKAGES = frozenset({"builtins", "jax", "jaxlib", "numpy"})


def variables_of(tree: Any) -> dict[str, Variable]:
    """Returns the Variables in a tree of objects, by their path: ``layers.0.weight``.

    Arguments:
      tree: dictionaries, lists, tuples, and objects, whose attributes are searched; or a loaded
        function. A Variable that occurs twice is listed under its first path. A key that is not a
        plain name is quoted in the path: ``{"a.b": v}`` has the path ``"a.b"``, with the quotes.

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
            name = path or item.name
            if name in found:
                raise ValueError(f"two Variables of the tree have the same path, {name}")
            found[name] = item
            continue
        below = list(_iterate_items(item))
        if below:
            seen.add(id(item))
        prefix = f"{path}." if path else ""
        waiting += [(f"{prefix}{_key_to_path_part(name)}", part) for name, part in reversed(below)]
    return found


def _key_to_path_part(name: Any) -> str:
    """Returns the part of a path for a key. Different keys have different parts: ``weight``; ``0``
    for an integer; in quotes, a string that would be ambiguous: ``"0"``, ``"a.b"``."""
    if type(name) is int:
        return str(name)
    if not isinstance(name, str):
        return f"<{name!r}>"
    is_plain = name and name[0] not in '<"' and "." not in name and not name.lstrip("-").isdigit()
    return name if is_plain else json.dumps(name, ensure_ascii=False)


def _iterate_items(item: Any) -> Iterator[tuple[Any, Any]]:
    kind: Any = type(item)
    if isinstance(item, Mapping):
        yield from item.items()
    elif isinstance(item, tuple) and hasattr(kind, "_fields"):
        yield from zip(kind._fields, item, strict=True)
    elif isinstance(item, (list, tuple)):
        yield from enumerate(item)
    elif isinstance(item, LoadedFunction):
        yield from item.variables.items()
    elif not isinstance(item, _CLOSED) and kind.__module__.split(".")[0] not in _CLOSED_PACKAGES:
        yield from _attributes_and_slots(item).items()


def _attributes_and_slots(item: Any) -> dict[str, Any]:
    """Calls no property and no `__getattr__`: they compute, and their code may itself call
    `variables_of`."""
    found: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):  # it may have slots only
        found.update(object.__getattribute__(item, "__dict__"))
    for kind in type(item).__mro__:
        members = vars(kind).items() if "__slots__" in vars(kind) else ()
        for name, member in members:
            if isinstance(member, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # the slot may be empty
                    found.setdefault(name, member.__get__(item))
    return found


def is_key(holder: Any) -> bool:
    """Whether a Variable, or an array, holds random keys."""
    return bool(jax.numpy.issubdtype(holder.dtype, jax.dtypes.prng_key))


def stored_form(value: Any) -> Any:
    """Returns the words of random keys, and other arrays unchanged."""
    return jax.random.key_data(value) if is_key(value) else value


_WIDE = frozenset({"float64", "int64", "uint64", "complex128"})


def check_width(dtypes: Set[str], what: str) -> None:
    """Raises ValueError if a dtype has 64 bits, but JAX is set to 32 bits."""
    wide = sorted(_WIDE & dtypes)
    if wide and jax.numpy.result_type(float) != jax.numpy.float64:
        raise ValueError(
            f"{what} {', '.join(wide)}, but JAX is set to 32 bits: "
            'call jax.config.update("jax_enable_x64", True) before'
        )


def not_while_tracing(name: str) -> None:
    """In a trace, the file would be written once, and never when the compiled program runs."""
    if _jax.staging_trace() is not None:
        raise RuntimeError(f"{name} is called inside a function that is being traced")
