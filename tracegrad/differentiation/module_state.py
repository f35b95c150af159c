"""What a function that is differentiated assigns in modules of flax.nnx that it is given.

It gets copies of them, made of the values that are differentiated. What it has assigned in those
(statistics, counts of random numbers) goes into the modules themselves, as by `nnx.grad`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from tracegrad.differentiation.selection import Argument, Selection
from tracegrad.ir.wording import with_article
from tracegrad.variables.modules import is_whole
from tracegrad.variables.nnx_objects import is_module, is_variable_of_nnx
from tracegrad.variables.statics import is_variable


class ModuleState:
    """The state of the modules of a call, if it is given any, through one call of its function."""

    def __init__(self, selection: Selection):
        self._selection = selection
        self._beside: list[Argument] = []
        self._changed: list[int] = []
        self._has_modules = False
        if is_whole() is None:  # without flax there are none
            return
        beside = [argument for argument in selection.others if _has_modules(argument)]
        self._has_modules = bool(beside) or any(map(_has_modules, selection.arguments))
        if not self._has_modules:
            return
        # A copy of what another argument holds too would not be one with that: flax refuses then
        # that it is changed.
        uses = Counter(
            id(variable)
            for argument in (*selection.arguments, *beside)
            for variable in {id(each): each for each in _variables(argument)}.values()
        )
        self._beside = [a for a in beside if all(uses[id(v)] == 1 for v in _variables(a))]

    def call(self, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Calls the function with these for its selected leaves; returns its result, and what it
        has assigned, for `assign`."""
        if not self._has_modules:
            return self._selection.call(leaves), []
        args, kwargs, filled = self._selection.filled(leaves, self._beside)
        structure: Any
        changed_structure: Any
        before, structure = jax.tree.flatten(filled)
        result = self._selection.fun(*args, **kwargs)
        after, changed_structure = jax.tree.flatten(filled)
        if structure != changed_structure:
            raise TypeError(
                "a function that is differentiated changes the structure of a module of flax.nnx "
                "that it is given: its attributes, or what there is of variables. Change it "
                "before (model.eval(), a Variable with an initial value)"
            )
        pairs = enumerate(zip(before, after, strict=True))
        self._changed = [i for i, (old, new) in pairs if old is not new]
        return result, [after[i] for i in self._changed]

    def assign(self, values: Sequence[Any]) -> None:
        """Puts what the last call has assigned into the modules themselves."""
        places = self._places() if values else []
        for i, value in zip(self._changed, values, strict=True):
            variable, leaf = places[i]
            if not is_variable_of_nnx(variable):
                raise TypeError(
                    "a function that is differentiated assigns "
                    f"{with_article(type(variable).__name__)} in a module of flax.nnx that it is "
                    "given, which would be lost. Make it an nnx.Variable"
                )
            leaves, structure = jax.tree.flatten(variable.get_raw_value())
            leaves[leaf] = value
            variable.set_raw_value(jax.tree.unflatten(structure, leaves))

    def _places(self) -> list[tuple[Any, int]]:
        """For each leaf the nnx.Variable that it is in, and which of its leaves it is."""
        trees = [each.tree for each in (*self._selection.arguments, *self._beside)]
        nodes = jax.tree.leaves(trees, is_leaf=is_variable_of_nnx)
        return [(node, i) for node in nodes for i in range(len(jax.tree.leaves(node)))]


def _has_modules(argument: Argument) -> bool:
    """Whether there are modules in an argument."""
    is_leaf: Any = is_whole()
    nodes = jax.tree.leaves(argument.tree, is_leaf=lambda node: is_leaf(node) or is_variable(node))
    return any(map(is_module, nodes))


def _variables(argument: Argument) -> list[Any]:
    """The nnx.Variables in an argument."""
    nodes = jax.tree.leaves(argument.tree, is_leaf=is_variable_of_nnx)
    return list(filter(is_variable_of_nnx, nodes))
