"""Finds the changes of a function in an `nnx.State` argument that would be lost.

An nnx.State is a tree of arrays like any other: the function gets a copy, and returns the new
state. If the function changes the copy (a module made by `nnx.merge` may share its variables) and
does not return it, the changes are lost after the call: the user would train a model that never
changes. So the call warns (`ir.wording.changes_lost`). Changes in modules are not lost: see
`modules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from tracegrad.ir import Call
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

    def changes(self, result: Any) -> StateChanges:
        """The changes that are not in the function's result."""
        changes = StateChanges()
        if not self._states:
            return changes
        returned = set(map(id, NnxObjectFinder().flatten(result, [])[0]))
        for (name, state), (leaves, structure) in zip(self._states, self._before, strict=True):
            now, new_structure = jax.tree.flatten(state)
            if structure != new_structure:
                changes.structures.append(f"{name} (its structure)")
                continue
            pairs = list(zip(leaves, now, strict=True))
            lost = [
                i
                for i, (old, new) in enumerate(pairs)
                if old is not new and id(new) not in returned
            ]
            names = leaves_of(state) if lost else []
            changes.paths += [names[i].within(name).name for i in lost]
            changes.values += [pairs[i] for i in lost]
        return changes


@dataclass
class StateChanges:
    """Changes in states.

    Attributes:
      structures: the paths of the states whose structure has changed.
      paths, values: the paths of the changed arrays, and the pairs (array before, array after).
    """

    structures: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    values: list[tuple[Any, Any]] = field(default_factory=list)


def is_passed_on(before: Any, after: Any) -> bool:
    """Whether `after` is `before`, passed through calls of jitted functions in a graph."""
    while after is not before:
        node = getattr(after, "producer", None)
        if not isinstance(node, Call) or len(node.regions) != 1 or node.op != "jit":
            return False
        (region,) = node.regions.values()
        out = region.outputs[node.outputs.index(after)]
        if out not in region.inputs:
            return False
        after = node.inputs[region.inputs.index(out)]
    return True
