"""Calls a function inside its trace: the arguments that it gets, and the outputs of its program.

The function gets Variables as they are, and modules of flax.nnx made of traced arrays. If it
changes an array in a module, the new array is an output of the program. A `Capture` finds the
Variables that the function uses. A module that it closes over is a constant, as under `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad.variables.capture import Capture
from tracegrad.variables.modules import (
    Again,
    Root,
    Snapshot,
    Survey,
    Twins,
    Update,
    is_module_or_variable,
    is_opaque,
    mark_roots,
    with_modules,
    with_objects,
)
from tracegrad.variables.nnx_objects import nnx
from tracegrad.variables.packed import unpacked
from tracegrad.variables.states import Changes, States
from tracegrad.variables.statics import are_arrays, fix, has_nodes, structure_with
from tracegrad.variables.variable import Variable

Dynamic = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class Inside:
    """Calls one function inside its trace, and records the facts that its program does not hold.

    Attributes:
      variables: the Variables that the function has read and assigned.
      out_tree: the structure of its result.
      updates: where in the modules of the call the last outputs go.
      changes_structure: whether the function has changed the structure of these modules: then its
        result is `Twins`.
      lost: the function's changes in an nnx.State that it does not return.
    """

    def __init__(self) -> None:
        self.variables = Capture()
        self.out_tree: Any = None
        self.updates: tuple[Update, ...] = ()
        self.changes_structure = False
        self.lost = Changes()

    def run(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: Callable[[int], list[str]],
        dynamic: Dynamic,
        donated: Dynamic,
    ) -> Any:
        """Calls the function, inside the trace of its program.

        Args:
          args, kwargs: the packed arguments.
          names: returns the names of so many positional arguments, for messages.
          dynamic, donated: select, from (args, kwargs), the arguments that are not static, and the
            donated arguments.

        Returns the result in a form in which JAX finds only arrays. If the function has assigned
        anything, it returns a pair: this result, and the new values (the last value of each
        Variable, then the new arrays of modules).
        """
        with self.variables.captured():
            packed = args, kwargs
            args, kwargs = unpacked(args, kwargs)
            if nnx() is None:
                result, updates = self._packed(fun(*args, **kwargs), []), []
            else:
                states = States({**dict(zip(names(len(args)), args)), **kwargs})
                before = Snapshot(dynamic(args, kwargs))
                result = fun(*args, **kwargs)
                gone = jax.tree.leaves(donated(*packed))
                updates = self._updates(before, dynamic(args, kwargs), gone)
                self.lost = states.changes(result)
                result = self._packed(result, before.objects)
                if self.changes_structure:  # `Twins` in the result hold all new arrays
                    self.updates, updates = (), []
            values = [*self.variables.last_values(), *updates]
            return (result, values) if values else result  # JAX's messages give the path in this

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
