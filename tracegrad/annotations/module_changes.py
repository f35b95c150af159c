"""Refuses an annotated function that changes a module of flax.nnx among its arguments.

The function gets copies of its arguments, which hold the arrays of its trace. What it assigns in a
copy (statistics, counts of random numbers) would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tracegrad.ir.wording import described
from tracegrad.tracing.modules import Snapshot
from tracegrad.tracing.nnx_objects import nnx

R = TypeVar("R")


def refuse_changes(fun: Callable[..., Any], copies: Any, call: Callable[[], R], cure: str) -> R:
    """Returns the result of `call`, which passes `copies` of the arguments to `fun`. Raises
    TypeError, with a cure, if `fun` changes a module among the copies."""
    before = None if nnx() is None else Snapshot(copies)
    result = call()
    if before is not None and before.objects and before.changed(copies, ()) != []:
        raise TypeError(
            f"{described(fun)} changes a module of flax.nnx among its arguments (statistics, "
            "counts of random numbers, its structure). The function has a copy of the module, so "
            f"the change would be lost: {cure}"
        )
    return result
