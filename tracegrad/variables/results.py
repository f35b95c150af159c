"""Puts the result of a program together for the caller, and gives new arrays to their modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegrad.variables.modules import Again, Root, Twins, Update, with_modules, with_objects
from tracegrad.variables.nnx_objects import nnx
from tracegrad.variables.statics import has_nodes


def settled(
    result: Any,
    objects: Sequence[Any],
    updates: Sequence[Update],
    values: Sequence[Any],
    *,
    is_in_parts: bool,
) -> Any:
    """Returns the result of a call, and gives the new arrays to the caller's modules.

    Args:
      objects: the objects of the call.
      updates, values: where the new arrays of the objects go, and these arrays.
      is_in_parts: whether the result contains `Root`, `Again` or `Twins` (see `hands_out`), which
        are replaced by modules.
    """
    for update, value in zip(updates, values, strict=True):
        update.assign(objects, value)
    if not is_in_parts:
        return result
    result = with_modules(result)
    if isinstance(result, Twins):
        return result.taken_over(objects)
    return with_objects(result, objects)


def hands_out(structure: Any) -> bool:
    """Whether results of a structure contain modules of flax.nnx that must be put together."""
    return nnx() is not None and has_nodes(structure, (Again, Root, Twins))
