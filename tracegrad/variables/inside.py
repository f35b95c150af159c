"""What a function gets for its arguments while it is traced, and what comes out of it.

Variables are themselves, and modules of flax.nnx are made of the traced arrays. What has another
value in those when the function is over is an output of its program. The Variables that it uses are
found by a `Capture`. A module that it closes over is a constant, as under `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad.variables.capture import Capture
from tracegrad.variables.modules import (
    Again,
    Contents,
    Root,
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
    """What one function gets while it is traced, and what is known of it then beside its program.

    Attributes:
      variables: the Variables that it has read and assigned.
      out_tree: the structure of its result.
      updates: where in the modules of the call the last outputs go.
      changes_structure: whether it has changed what these are made of: then its result is `Twins`.
      lost: what it has changed in an nnx.State and does not return.
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
          args, kwargs: packed.
          names: those of so many positional arguments, for messages.
          dynamic, donated: those of the arguments that are not static, and those that are given
            away.

        Returns its result as JAX gets it, in which it finds arrays alone; where it has assigned
        something, together with the new values: the last one of each Variable, and those of arrays
        of its modules.
        """
        with self.variables.captured():
            gone = jax.tree.leaves(donated(args, kwargs))
            args, kwargs = unpacked(args, kwargs)
            if nnx() is None:
                result, updates = self._packed(fun(*args, **kwargs), []), []
            else:
                states = States({**dict(zip(names(len(args)), args)), **kwargs})
                before = Contents(dynamic(args, kwargs))
                result = fun(*args, **kwargs)
                updates = self._updates(before, dynamic(args, kwargs), gone)
                self.lost = states.changes(result)
                result = self._packed(result, before.objects)
                if self.changes_structure:  # all comes out in the result
                    self.updates, updates = (), []
            values = [*self.variables.last_values(), *updates]
            return (result, values) if values else result  # messages then say where in it

    def _updates(self, before: Contents, arguments: Any, gone: Sequence[Any]) -> list[Any]:
        if not before.objects:
            return []
        changed = before.changed(arguments, gone)
        if changed is None:
            self.changes_structure = True
            return []
        self.updates = tuple([update for update, _ in changed])
        return [value for _, value in changed]

    def _packed(self, result: Any, objects: Sequence[Any], *, by_flax: bool = False) -> Any:
        """A result as JAX gets it.

        Args:
          objects: those of the call. Where one is in the result, the caller gets theirs.
          by_flax: whether it has modules of classes that are no pytrees.
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
        # JAX would read a Variable later, when nobody listens any more.
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
    """The result of a call, whose modules get what the function has changed in them.

    Args:
      structure: `Inside.out_tree`.
      arrays: of the result.
      objects: of the call.
      updates, values: new arrays of these, and where they go.
    """
    for update, value in zip(updates, values, strict=True):
        update.assign(objects, value)
    result = jax.tree.unflatten(structure, arrays)
    return put_together(result, objects) if hands_out(structure) else result


def put_together(result: Any, objects: Sequence[Any]) -> Any:
    """A result with the modules that stand in it for others.

    Args:
      objects: of the call.
    """
    result = with_modules(result)
    if isinstance(result, Twins):
        return result.taken_over(objects)
    return with_objects(result, objects)


def hands_out(structure: Any) -> bool:
    """Whether results of a structure are to be put together."""
    return nnx() is not None and has_nodes(structure, (Again, Root, Twins))
