"""Calls a function inside its trace: unpacks the arguments, and packs the outputs of the program.

The function gets the Variables themselves, and nnx modules made of traced arrays. If the function
changes an array in a module, the new array is an output of the program. A `Capture` finds the
Variables that the function uses. A module that the function closes over is a constant, as under
`jax.jit`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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


@dataclass(eq=False, repr=False)
class CallInTrace:
    """The call of one function inside its trace: the function that JAX traces. It records facts
    that the program does not hold.

    JAX caches the trace of a function by its identity, with the values that the function closed
    over then. Each trace has a new object of this class, so it is made with the values of now.

    Attributes:
      fun, call: the user's function, and the packed call.
      name, signature: of the program.
      donated, shardings: the arguments that the call donates, and the shardings of the arguments
        that are not static.
      paths: the paths of the traced arrays.
      within: makes the context for the call of the function.
      variables: the Variables that the function has read and assigned.
      out_tree: the structure of its result.
      updates: the places of the last outputs in the modules of the call. If the function has
        changed the structure of these modules, the result is `ResultWithModules`, with all arrays.
      lost: the paths of the function's changes in an nnx.State that it does not return.
    """

    fun: Callable[..., Any]
    call: PackedCall
    name: str
    signature: inspect.Signature | None
    donated: StaticArguments
    shardings: Sequence[Any]
    paths: Sequence[str]
    within: Within
    variables: Capture = field(init=False)
    out_tree: Any = None
    updates: tuple[Update, ...] = ()
    lost: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        inner = self.fun
        while isinstance(inner, functools.partial):  # JAX takes the name and the line from inside
            inner = inner.func
        functools.update_wrapper(self, inner, updated=())
        self.__name__ = self.name
        self.__qualname__ = getattr(inner, "__qualname__", self.name)
        if self.signature is not None:
            self.__signature__ = self.signature

    def __repr__(self) -> str:
        return repr(self.fun)  # JAX's messages print it

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the function with packed arguments that are not static, inside the trace of its
        program.

        Returns the result in a form in which JAX finds only arrays. If the function has assigned
        anything, returns a pair: the result, and the new values (the last value of each Variable,
        then the new arrays of modules).
        """
        call = self.call.with_dynamic(args, kwargs)
        traced = jax.tree.leaves((args, kwargs))
        with known_by_path(traced, self.paths), capturing() as self.variables:
            result, updates = (self._run if nnx() is None else self._run_with_modules)(call)
            values = [*self.variables.last_values(), *updates]
            return (result, values) if values else result  # JAX's messages give the path in this

    def _run(self, call: PackedCall) -> tuple[Any, list[Any]]:
        args, kwargs = unpack_arguments(call.args, call.kwargs)
        result = _call_user(self.fun, self.within, *args, **kwargs)
        return self._fixed(result, *jax.tree.flatten(result, is_leaf=is_variable)), []

    def _run_with_modules(self, call: PackedCall) -> tuple[Any, list[Any]]:
        """Calls the function; also returns the new arrays of modules."""
        gone = self._gone(call)
        args, kwargs = unpack_arguments(call.args, call.kwargs)
        unpacked = PackedCall(args, kwargs, call.static)
        states, dynamic = States(dict(unpacked.by_name[0])), unpacked.dynamic
        before = Snapshot(dynamic)
        refuse_other_shardings(self.shardings, dynamic[0])
        result = _call_user(self.fun, self.within, *args, **kwargs)
        lay_out(self.shardings, dynamic[0])
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
        parts = zip(self.shardings, call.dynamic[0], strict=False)
        laid_out = [arg for part, arg in parts if has_mapping(part)]
        return jax.tree.leaves((self.donated.chosen(call.args, call.kwargs), laid_out))

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
