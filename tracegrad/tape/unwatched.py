"""Which sources of a tape have no gradient because nobody has watched them: it warns of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.tape.record import Record
from tracegrad.variables.leaves import Leaf


def warn_of_unwatched(
    record: Record, arrays: Sequence[Any], leaves: Sequence[Leaf], found: Sequence[Any]
) -> None:
    """Warns, at the user's line, of the sources whose gradients are None for want of a `watch`.

    Not of what is left out on purpose: Variables, which say themselves whether they are watched;
    what is used while the tape does not record; and what modules do not train.
    """
    names = [
        f"sources.{leaf.name}" if leaf.name else "the source"
        for array, leaf, gradient in zip(arrays, leaves, found, strict=True)
        if gradient is None and _is_unwatched(record, array, leaf)
    ]
    if not names:
        return
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    *first, last = [*names[:3], *more]
    if first:
        told = f"the gradients of {', '.join(first)} and {last} are None"
        them, they_were = "them", "they were"
    else:
        told, them, they_were = f"the gradient of {last} is None", "it", "it was"
    warn_where_called(
        f"{told}, since the tape did not watch {them} when {they_were} used: call tape.watch, with "
        "the arrays or with the model that they are in, in the tape's block and before that",
        UserWarning,
    )


def _is_unwatched(record: Record, array: Any, leaf: Leaf) -> bool:
    if not isinstance(array, jax.Array) or not _jax.has_gradient(array):
        return False
    if leaf.is_module_state:  # a jitted function that was not followed may have given it back
        return leaf.is_trained and id(array) not in record.tracked
    return record.was_used_unfollowed(array)
