"""Calls a function inside its trace: unpacks the arguments, and packs the outputs of the program.

The function gets the Variables themselves, and nnx modules made of traced arrays. If the function
changes an array in a module, the new array is an output of the program. A `Capture` finds the
Variables that the function uses. A module that the function closes over is a constant, as under
`jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from tracegrad.ir.frames import CALLS_TRACED
from tracegrad.tracing.argument_paths import known_by_path
from tracegrad.tracing.arguments import PackedCall, StaticArguments
from tracegrad.tracing.call_scopes import call_scopes
from tracegrad.tracing.modules import (
    NnxObjectFinder,
    ResultWithModules,
    Snapshot,
    Update,
)
from tracegrad.tracing.nnx_objects import nnx
from tracegrad.tracing.packed import unpack_arguments
from tracegrad.tracing.shardings import has_mapping, lay_out, refuse_other_shardings
from tracegrad.tracing.states import States
from tracegrad.tracing.statics import are_arrays, replace_by_statics, structure_with
from tracegrad.variables.capture import Capture, capturing
from tracegrad.variables.trees import is_variable
from tracegrad.variables.variable import Variable

Within = Callable[[], AbstractContextManager[Any]]  # makes the context for the call of the function


class CallInTrace:
    """The call of one function inside its trace; records facts that the program does not hold.

    Args:
      call: the packed call.
      donated, shardings: the arguments that the call donates, and the shardings of the arguments
        that are not static.
      paths: the paths of the traced arrays.
      within: makes the context for the call of the function.

    Attributes:
      variables: the Variables that the function has read and assigned.
      out_tree: the structure of its result.
      updates: the places of the last outputs in the modules of the call. If the function has
        changed the structure of these modules, the result is `ResultWithModules`, with all arrays.
      lost: the paths of the function's changes in an nnx.State that it does not return.
    """

    variables: Capture

    def __init__(
        self,
        call: PackedCall,
        donated: StaticArguments,
        shardings: Sequence[Any],
        paths: Sequence[str],
        within: Within,
    ) -> None:
        self._call, self._donated, self._shardings = call, donated, shardings
        self._paths, self._within = paths, within
        self.out_tree: Any = None
        self.updates: tuple[Update, ...] = ()
        self.lost: tuple[str, ...] = ()

    def run(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function with packed arguments that are not static, inside the trace of its
        program.

        Returns the result in a form in which JAX finds only arrays. If the function has assigned
        anything, returns a pair: the result, and the new values (the last value of each Variable,
        then the new arrays of modules).
        """
        fixed = self._call.static.named(self._call.kwargs)
        call = self._call._replace(args=args, kwargs={**kwargs, **fixed})
        traced = jax.tree.leaves(call.dynamic)
        with known_by_path(traced, self._paths), capturing() as self.variables:
            run = self._run if nnx() is None else self._run_with_modules
            result, updates = run(fun, call)
            values = [*self.variables.last_values(), *updates]
            return (result, values) if values else result  # JAX's messages give the path in this

    def _run(self, fun: Callable[..., Any], call: PackedCall) -> tuple[Any, list[Any]]:
        args, kwargs = unpack_arguments(call.args, call.kwargs)
        result = _call_user(fun, self._within, *args, **kwargs)
        return self._fixed(result, *jax.tree.flatten(result, is_leaf=is_variable)), []

    def _run_with_modules(self, fun: Callable[..., Any], call: PackedCall) -> tuple[Any, list[Any]]:
        """Calls the function; also returns the new arrays of modules."""
        gone = self._gone(call)
        args, kwargs = unpack_arguments(call.args, call.kwargs)
        unpacked = call._replace(args=args, kwargs=kwargs)
        arguments, _ = unpacked.by_name()
        states, dynamic = States(dict(arguments)), unpacked.dynamic
        before = Snapshot(dynamic)
        refuse_other_shardings(self._shardings, dynamic[0])
        result = _call_user(fun, self._within, *args, **kwargs)
        lay_out(self._shardings, dynamic[0])
        self.lost = states.lost_changes(result)
        changed = before.changed(dynamic, gone) if before.objects else []
        if changed is None:
            result = ResultWithModules(before.objects, result)
            leaves, tree = result.flatten()
        else:
            leaves, tree = NnxObjectFinder(before.objects).flatten(result, None)
        self.updates = tuple([update for update, _ in changed or ()])
        return self._fixed(result, leaves, tree), [value for _, value in changed or ()]

    def _gone(self, call: PackedCall) -> list[Any]:
        """Returns the packed arrays that the caller cannot keep, changed or not."""
        given_away = [call.args[i] for i in self._donated.within(call.args)]
        parts = zip(self._shardings, call.dynamic[0], strict=False)
        laid_out = [arg for part, arg in parts if has_mapping(part)]
        return jax.tree.leaves((given_away, self._donated.named(call.kwargs), laid_out))

    def _fixed(self, whole: Any, leaves: list[Any], tree: Any) -> Any:
        """Returns `whole` if its leaves are arrays; else a list of its arrays. Sets `out_tree`."""
        if are_arrays(leaves):
            self.out_tree = tree
            return whole
        # Read Variables now: JAX would read them after the capture has stopped listening.
        leaves = [leaf.value if isinstance(leaf, Variable) else leaf for leaf in leaves]
        replace_by_statics(leaves, tree, "result", is_result=True)
        self.out_tree = structure_with(tree, leaves)
        return jax.tree.leaves(leaves)


@CALLS_TRACED
def _call_user(fun: Callable[..., Any], within: Within, /, *args: Any, **kwargs: Any) -> Any:
    """Marks in tracebacks where the user's program begins."""
    with within(), call_scopes():
        return fun(*args, **kwargs)
