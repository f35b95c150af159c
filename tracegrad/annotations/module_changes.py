"""The changes that an annotated function makes to the modules of flax.nnx among its arguments.

The function gets copies of its arguments, which hold the arrays of its trace. The new arrays of a
copy (statistics, counts of random numbers) belong in the caller's module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tracegrad.ir.wording import described
from tracegrad.tracing.modules import Snapshot, Update
from tracegrad.tracing.nnx_objects import nnx
from tracegrad.tracing.packed import finish_result


class ModuleChanges:
    """For one call of an annotated function."""

    def __init__(self, fun: Callable[..., Any], arguments: Any):
        self._fun = fun
        self._objects = [] if nnx() is None else Snapshot(arguments).objects
        self._updates: list[Update] = []

    def run(self, copies: Any, call: Callable[[], Any]) -> tuple[Any, list[Any]]:
        """Runs `call`, which passes copies of the arguments to the function; returns its result and
        the new arrays in the copies. Raises TypeError if the function changes the structure of a
        module."""
        if not self._objects:
            return call(), []
        before = Snapshot(copies)
        result = call()
        found = before.changed(copies, ())
        if found is None or (found and len(before.objects) != len(self._objects)):
            raise TypeError(
                f"{described(self._fun)} changes the structure of a module of flax.nnx among its "
                "arguments, or changes a Variable that is in several of its arguments: make the "
                "change outside of the annotated function, or pass the module once"
            )
        self._updates = [update for update, _ in found]
        return result, [value for _, value in found]

    def settle(self, result: Any, values: list[Any]) -> Any:
        """Assigns the new arrays, as they are outside of the trace, to the caller's modules."""
        return finish_result(result, self._objects, self._updates, values, has_objects=False)
