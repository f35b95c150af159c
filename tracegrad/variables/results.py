"""Makes the caller's result from the result of a program, and updates the caller's modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegrad.variables.modules import (
    FlattenedModule,
    RepeatedObject,
    ResultWithModules,
    Update,
    restore_repeated_objects,
    unflatten_modules,
)
from tracegrad.variables.nnx_objects import nnx
from tracegrad.variables.statics import has_nodes


def finish_result(
    result: Any,
    objects: Sequence[Any],
    updates: Sequence[Update],
    values: Sequence[Any],
    *,
    has_objects: bool,
) -> Any:
    """Returns the caller's result of a call, and assigns the new arrays in the caller's modules.

    Args:
      objects: the nnx objects of the call.
      updates, values: the places of the new arrays, and the arrays.
      has_objects: `has_nnx_objects` of the result's structure.
    """
    for update, value in zip(updates, values, strict=True):
        update.assign(objects, value)
    if not has_objects:
        return result
    result = unflatten_modules(result)
    if isinstance(result, ResultWithModules):
        return result.write_back(objects)
    return restore_repeated_objects(result, objects)


def has_nnx_objects(structure: Any) -> bool:
    """Whether a result contains nodes that stand for nnx objects."""
    return nnx() is not None and has_nodes(
        structure, (RepeatedObject, FlattenedModule, ResultWithModules)
    )
