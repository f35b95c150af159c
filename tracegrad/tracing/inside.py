"""Calls a function inside its trace: the arguments that it gets, and the outputs of its program.

The function gets Variables as they are, and modules of flax.nnx made of traced arrays. If it
changes an array in a module, the new array is an output of the program. A `Capture` finds the
Variables that the function uses. A module that it closes over is a constant, as under `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from tracegrad.ir.frames import CALLS_TRACED
from tracegrad.tracing.argument_paths import known_by_path
from tracegrad.tracing.arguments import Call, StaticArguments
from tracegrad.tracing.call_scopes import call_scopes
from tracegrad.tracing.shardings import lay_out, maps, refuse_other_shardings
from tracegrad.tracing.signatures import argument_names
from tracegrad.variables.capture import Capture
from tracegrad.variables.modules import (
    Snapshot,
    Survey,
    Twins,
    Update,
    is_module_or_variable,
    is_opaque,
    mark_roots,
)
from tracegrad.variables.nnx_objects import nnx
from tracegrad.variables.packed import unpacked
from tracegrad.variables.states import Changes, States
from tracegrad.variables.statics import are_arrays, fix, structure_with
from tracegrad.variables.variable import Variable

Within = Callable[[], AbstractContextManager[Any]]  # makes the context that a function is traced in


class Inside:
    """Calls one function inside its trace, and records the facts that its program does not hold.

    Args:
      call: the call that is traced; its arguments come after those of a `functools.partial`.
      static, static_kwargs: which arguments are static, and those given by keyword.
      donated, shardings: the arguments that the call donates, and the shardings of those that are
        not static.
      paths: the paths of the traced arrays.
      within: makes the context that the function is called in.

    Attributes:
      variables: the Variables that the function has read and assigned.
      out_tree: the structure of its result.
      updates: where in the modules of the call the last outputs go.
      changes_structure: whether the function has changed the structure of these modules: then its
        result is `Twins`.
      lost: the function's changes in an nnx.State that it does not return.
    """

    def __init__(
        self,
        call: Call,
        static: StaticArguments,
        static_kwargs: Mapping[str, Any],
        donated: StaticArguments,
        shardings: Sequence[Any],
        paths: Sequence[str],
        within: Within,
    ) -> None:
        self._call, self._static, self._static_kwargs = call, static, static_kwargs
        self._donated, self._shardings = donated, shardings
        self._paths, self._within = paths, within
        self.variables = Capture()
        self.out_tree: Any = None
        self.updates: tuple[Update, ...] = ()
        self.changes_structure = False
        self.lost = Changes()

    def run(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function with packed arguments, inside the trace of its program.

        Returns the result in a form in which JAX finds only arrays. If the function has assigned
        anything, it returns a pair: this result, and the new values (the last value of each
        Variable, then the new arrays of modules).
        """
        kwargs = {**kwargs, **self._static_kwargs}
        traced = jax.tree.leaves(self._dynamic(args, kwargs))
        with known_by_path(traced, self._paths), self.variables.captured():
            run = self._run if nnx() is None else self._run_with_modules
            result, updates = run(fun, args, kwargs)
            values = [*self.variables.last_values(), *updates]
            return (result, values) if values else result  # JAX's messages give the path in this

    def _run(
        self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        args, kwargs = unpacked(args, kwargs)
        return self._packed(_call(fun, self._within, *args, **kwargs), []), []

    def _run_with_modules(
        self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        """Calls the function; also returns the new arrays of modules."""
        packed = args, kwargs
        args, kwargs = unpacked(args, kwargs)
        names = argument_names(fun, len(args))
        states = States({**dict(zip(names, args, strict=True)), **kwargs})
        before = Snapshot(self._dynamic(args, kwargs))
        refuse_other_shardings(self._shardings, self._dynamic(args, kwargs)[0])
        result = _call(fun, self._within, *args, **kwargs)
        lay_out(self._shardings, self._dynamic(args, kwargs)[0])
        updates = self._updates(before, self._dynamic(args, kwargs), self._gone(*packed))
        self.lost = states.changes(result)
        result = self._packed(result, before.objects)
        if self.changes_structure:  # `Twins` in the result hold all new arrays
            self.updates, updates = (), []
        return result, updates

    def _own(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns the arguments of the call, without those that a `functools.partial` fills in."""
        filled_in = len(args) - len(self._call.args)
        return args[filled_in:], {name: kwargs[name] for name in self._call.kwargs}

    def _dynamic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the arguments of the call that are not static, as (args, kwargs)."""
        return self._static.apart(*self._own(args, kwargs))[0]

    def _gone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Returns the packed arrays for which the caller needs new ones, changed or not."""
        args, kwargs = self._own(args, kwargs)
        _, positions, named = self._donated.apart(args, kwargs)
        parts = zip(self._shardings, self._static.apart(args, kwargs)[0][0], strict=False)
        laid_out = [arg for part, arg in parts if maps(part)]
        return jax.tree.leaves(([args[i] for i in positions], named, laid_out))

    def _updates(self, before: Snapshot, arguments: Any, gone: Sequence[Any]) -> list[Any]:
        if not before.objects:
            return []
        changed = before.changed(arguments, gone)
        if changed is None:
            self.changes_structure = True
            return []
        self.updates = tuple([update for update, _ in changed])
        return [value for _, value in changed]

    def _packed(self, result: Any, objects: Sequence[Any], *, by_flax: bool = False) -> Any:
        """Returns a result in a form in which JAX finds only arrays; sets `out_tree`.

        Args:
          objects: the objects of the call. If one is in the result, the caller gets their own.
          by_flax: whether flax must flatten the result, since some module is not a pytree.
        """
        by_flax = by_flax or self.changes_structure
        whole = Twins(list(objects), result) if self.changes_structure else result
        survey = None if by_flax or nnx() is None else Survey(objects)

        if survey is None:
            leaves, tree = jax.tree.flatten(whole, is_leaf=is_module_or_variable)
        else:
            leaves, tree = survey.flatten(whole, None)
        if are_arrays(leaves):
            self.out_tree = tree
            return whole
        if survey is not None and any(map(is_opaque, leaves)):
            self.changes_structure = bool(objects)
            return self._packed(result, objects, by_flax=True)
        mark_roots([leaves], [])
        # Read Variables now: JAX would read them after the capture has stopped listening.
        leaves = [leaf.value if isinstance(leaf, Variable) else leaf for leaf in leaves]
        fix(leaves, tree, "result", is_result=True)
        self.out_tree = structure_with(tree, leaves)
        return jax.tree.leaves(leaves)


@CALLS_TRACED
def _call(fun: Callable[..., Any], within: Within, /, *args: Any, **kwargs: Any) -> Any:
    """Calls the user's function; marks in tracebacks where the user's program begins."""
    with within(), call_scopes():
        return fun(*args, **kwargs)
