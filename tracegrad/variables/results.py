"""Puts the result of a program together for the caller, and gives new arrays to their modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tracegrad.variables.modules import Again, Root, Twins, Update, with_modules, with_objects
from tracegrad.variables.nnx_objects import nnx
from tracegrad.variables.statics import has_nodes


def settled(
    structure: Any,
    arrays: Sequence[Any],
    objects: Sequence[Any],
    updates: Sequence[Update] = (),
    values: Sequence[Any] = (),
) -> Any:
    """Returns the result of a call, and gives the new arrays to the caller's modules.

    Args:
      structure: `Inside.out_tree`.
      arrays: the arrays of the result.
      objects: the objects of the call.
      updates, values: where the new arrays of the objects go, and these arrays.
    """
    for update, value in zip(updates, values, strict=True):
        update.assign(objects, value)
    result = jax.tree.unflatten(structure, arrays)
    return put_together(result, objects) if hands_out(structure) else result


def put_together(result: Any, objects: Sequence[Any]) -> Any:
    """Returns a result in which `Root`, `Again` and `Twins` are replaced by modules.

    Args:
      objects: the objects of the call.
    """
    result = with_modules(result)
    if isinstance(result, Twins):
        return result.taken_over(objects)
    return with_objects(result, objects)


def hands_out(structure: Any) -> bool:
    """Whether results of a structure need `put_together`."""
    return nnx() is not None and has_nodes(structure, (Again, Root, Twins))
