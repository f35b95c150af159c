"""What a function gets for its arguments while it is traced, and what comes out of it.

Variables are themselves, and modules of flax.nnx are made of the traced arrays. What has another
value in those when the function is over is an output of its program; a module that it returns is
one of the caller's, or a new one. The Variables that it uses are found by a
`Capture`. A module that it closes over is a constant, as under `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from tracegrad.variables.capture import Capture
from tracegrad.variables.modules import (
    Held,
    Modules,
    Reading,
    Setting,
    Structure,
    hold,
    is_held_or_variable,
    is_whole,
    read,
)
from tracegrad.variables.nnx_objects import (
    described,
    differences,
    find,
    is_module,
    is_state,
    nnx,
    static_attributes,
)
from tracegrad.variables.states import Changes, States
from tracegrad.variables.statics import (
    Static,
    are_arrays,
    fix,
    has_nodes,
    is_variable,
    structure_with,
)
from tracegrad.variables.trees import flattened, with_variables
from tracegrad.variables.variable import Variable


class Reference:
    """In a result, one of the objects in the modules of a call: a node without leaves."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


jax.tree_util.register_pytree_node(
    Reference, lambda reference: ((), reference.index), lambda index, _: Reference(index)
)


class Inside:
    """What one function gets while it is traced, and what is known of it then beside its program.

    Args:
      trace_again, apart: see `Capture`.

    Attributes:
      variables: the Variables that it has read and assigned.
      out_tree: the structure of its result.
      updates: which of the arrays of its modules it has assigned.
      settings: attributes of its modules that it has changed, and that are no data.
      lost: what it has changed in an nnx.State and does not return.
    """

    def __init__(self, trace_again: Callable[[], NoReturn], apart: set[Variable]):
        self.variables = Capture(trace_again, apart)
        self.out_tree: Any = None
        self.updates: tuple[int, ...] = ()
        self.settings: tuple[Setting, ...] = ()
        self.lost = Changes()
        self._places: list[int] = []  # of modules, among the leaves of the arguments
        self._given: Any = None
        self._modules: Any = None  # of traced arrays,
        self._before: Any = None  # and what is in them at the function's entry
        self._states: States | None = None

    def run(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: Callable[[int], list[str]],
    ) -> Any:
        """Calls the function, inside the trace of its program.

        Args:
          names: those of so many positional arguments, for messages.

        Returns its result as JAX gets it, in which it finds arrays alone; where it has assigned
        something, together with the new values: the last one of each Variable, and those of arrays
        of its modules.
        """
        self._names = names
        try:
            with self.variables.captured():
                args, kwargs = self._entering(args, kwargs)
                result, updates = self._leaving(fun(*args, **kwargs))
                values = [*self.variables.last_values(), *updates]
                return (result, values) if values else result  # messages then say where in it
        finally:  # their arrays know the function, which has this: see `Capture.captured`
            self._given = self._modules = self._before = self._states = None

    def _entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments (args, kwargs) for the user's function: with the Variables themselves, and
        with modules made of traced arrays."""
        self._given = args, kwargs
        is_leaf = is_whole()
        leaves, tree, _ = flattened(self._given, is_leaf)
        if is_leaf is not None:
            self._places = [i for i, leaf in enumerate(leaves) if type(leaf) is Held]
            if any(map(is_state, leaves)):
                self._states = States({**dict(zip(self._names(len(args)), args)), **kwargs})
        if self._places:
            held = [leaves[i] for i in self._places]
            self._structure: Structure = held[0].structure
            self._modules = self._structure.build([array for one in held for array in one.arrays])
            self._before = read(self._modules)
            for i, module in zip(self._places, self._modules, strict=True):
                leaves[i] = module
        return with_variables(tree, leaves)

    def _leaving(self, result: Any) -> tuple[Any, list[Any]]:
        values: list[Any] = []
        if self._places:
            now = read(self._modules)
            self.settings = self._settings(now)
            self._check_places(now)
            pairs = enumerate(zip(self._before.arrays, now.arrays, strict=True))
            self.updates = tuple([i for i, (old, new) in pairs if old is not new])
            values = [now.arrays[i] for i in self.updates]
        if self._states is not None:
            self.lost = self._states.changes(result)
        result = self._handed_out(result)
        leaves, tree = jax.tree.flatten(result, is_leaf=is_variable)
        if not are_arrays(leaves):
            # JAX would read a Variable later, when nobody listens any more.
            leaves = [leaf.value if isinstance(leaf, Variable) else leaf for leaf in leaves]
            fix(leaves, tree, is_result=True)
            tree = structure_with(tree, leaves)
            result = jax.tree.leaves(leaves)
        self.out_tree = tree
        return result, values

    def _settings(self, now: Reading) -> tuple[Setting, ...]:
        """The settings that the function has changed, as by ``model.eval()``. All else that
        programs are made for must be as it was."""
        if now.key == self._before.key:
            return ()
        as_before = self._structure.build(self._before.arrays)
        settings = []
        for i, (old, new) in enumerate(zip(read(as_before).objects, self._before.objects)):
            known = {name: Static(value) for name, value in static_attributes(old).items()}
            for name, value in static_attributes(new).items():
                setting = Setting(i, name, Static(value))
                if known.get(name) != setting.value:
                    setattr(old, name, value)
                    settings.append(setting)
        if read(as_before).key != now.key:
            names = self._module_names()
            raise TypeError(_structure_changed(as_before, self._modules, names))
        return tuple(settings)

    def _check_places(self, now: Reading) -> None:
        """Raises where an object of the modules is in the place of another one. Whoever has the
        caller's object of that place would get its values."""
        numbers = {id(node): i for i, node in enumerate(self._before.objects)}
        for i, node in enumerate(now.objects):
            number = numbers.get(id(node), i)
            if number != i:
                names, as_before = self._module_names(), self._structure.build(self._before.arrays)
                here = _path(node, self._modules, names)
                there = _path(read(as_before).objects[number], as_before, names)
                raise TypeError(
                    "a traced function moves parts of a module of flax.nnx that it is given: "
                    f"`{here}` is what `{there}` was. The caller's objects stay in their "
                    "places, and get new values. Exchange the values, as by `a[...], b[...] = "
                    "b[...], a[...]` or nnx.update, or move the objects before the call"
                )

    def _handed_out(self, result: Any) -> Any:
        """A result without modules that the function was given: references stand for them; and a
        new module in which something is met twice, which JAX would make two of, is `Held`."""
        is_leaf = is_whole()
        if is_leaf is None:
            return result
        leaves, tree = jax.tree.flatten(
            result, is_leaf=lambda n: is_leaf(n) or isinstance(n, Variable)
        )
        places = [i for i, leaf in enumerate(leaves) if is_module(leaf)]
        if not places:
            return result
        given = self._before.objects if self._places else ()
        numbers = {id(node): i for i, node in enumerate(given)}
        for i in places:
            if id(leaves[i]) in numbers:
                leaves[i] = Reference(numbers[id(leaves[i])])
        new = [leaves[i] for i in places if is_module(leaves[i])]
        reading = read(new)
        if any(id(node) in numbers for node in reading.objects):
            raise TypeError(
                "a traced function returns a new module of flax.nnx that holds a part of one that "
                "it is given. Return the two by themselves, and put them together afterwards"
            )
        if reading.has_references:
            hold(leaves)
        return jax.tree.unflatten(tree, leaves)

    def _module_names(self) -> list[str]:
        """What modules are called: ``models['student']``."""
        args, kwargs = self._given
        names = [*self._names(len(args)), *sorted(kwargs)]
        arguments = [*args, *(kwargs[name] for name in sorted(kwargs))]
        paths, _ = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=is_held_or_variable)
        return [
            names[path[0].idx] + jax.tree_util.keystr(path[1:])
            for path, leaf in paths
            if type(leaf) is Held
        ]


def _path(node: Any, modules: Sequence[Any], names: Sequence[str]) -> str:
    found = ((name, find(node, module)) for name, module in zip(names, modules, strict=True))
    return next(f"{name}{path}" for name, path in found if path is not None)


def _structure_changed(before: Sequence[Any], now: Sequence[Any], names: Sequence[str]) -> str:
    found = differences(described(before, names), described(now, names))
    where, was, is_now = found[0] if found else (names[0], "another", "changed")
    change = f"is {is_now}, and was {was}" if is_now != "absent" else "is gone"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        "a traced function changes the structure of a module of flax.nnx that it is given: "
        f"{where} {change}{more}. Programs are made for one structure, and give new "
        "values to the arrays in it, and to settings. Change the structure before the call (a "
        "Variable with an initial value; for what is sown, nnx.capture in the function), or build "
        "the module in the function and return it"
    )


def put_together(result: Any, modules: Modules | None) -> Any:
    """A result with the modules that stand in it for others; see `Inside.handed_out`.

    `modules`: those of the call.
    """
    leaves, tree = jax.tree.flatten(result, is_leaf=_is_handed_out)
    built: list[Any] | None = None
    for i, leaf in enumerate(leaves):
        if type(leaf) is Reference:
            assert modules is not None, "what is returned was given"
            leaves[i] = modules.objects[leaf.index]
        elif type(leaf) is Held:
            if built is None:
                arrays = [array for one in leaves if type(one) is Held for array in one.arrays]
                built = leaf.structure.build(arrays)
            leaves[i] = built[leaf.index]
    return jax.tree.unflatten(tree, leaves)


def hands_out(structure: Any) -> bool:
    """Whether results of a structure are to be put together."""
    if nnx() is None:
        return False
    return has_nodes(structure, (Reference, Held))


def _is_handed_out(node: object) -> bool:
    return type(node) is Reference or type(node) is Held
