"""Finds the changes of a function in an `nnx.State` argument that would be lost.

An nnx.State is a tree of arrays like any other: the function gets a copy, and returns the new
state. If the function changes the copy (a module made by `nnx.merge` may share its variables) and
does not return it, the changes are lost after the call: the user would train a model that never
changes. So the call warns (`ir.wording.changes_lost`). Changes in modules are not lost: see
`modules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from tracegrad.ir.paths import path_name
from tracegrad.tracing.leaves import leaves_of
from tracegrad.tracing.modules import NnxObjectFinder, is_state, is_whole_or_variable


class States:
    """The nnx.States in the arguments of a function, as they were before the call."""

    def __init__(self, arguments: Mapping[str, Any]):
        leaves = jax.tree_util.tree_leaves_with_path(dict(arguments), is_leaf=is_whole_or_variable)
        self._states = [(path_name(path), leaf) for path, leaf in leaves if is_state(leaf)]
        self._before: list[tuple[list[Any], Any]] = [
            jax.tree.flatten(state) for _, state in self._states
        ]

    def lost_changes(self, result: Any) -> tuple[str, ...]:
        """The paths of the changes that are not in the function's result."""
        if not self._states:
            return ()
        lost: list[str] = []
        returned = set(map(id, NnxObjectFinder().flatten(result, [])[0]))
        for (name, state), (leaves, structure) in zip(self._states, self._before, strict=True):
            now, new_structure = jax.tree.flatten(state)
            if structure != new_structure:
                lost.append(f"{name} (its structure)")
                continue
            lost += [
                leaf.within(name).name
                for leaf, old, new in zip(leaves_of(state), leaves, now, strict=True)
                if old is not new and id(new) not in returned
            ]
        return tuple(lost)
