"""What a function changes in an `nnx.State` that it is given, and what becomes of that.

A state alone is a tree of arrays like any other, of which the function gets a copy, and returns the
new one. If the function changes that copy (a module made of it, by `nnx.merge`, may share its
variables) and does not return it, that is lost when the function is over. It is noticed here, so
that nobody trains a model that stays as it is: a call that would lose something raises
(`ir.wording.changes_lost`), while a graph can be looked at. Modules themselves are another matter:
see `variables.modules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from tracegrad.ir import Call
from tracegrad.variables.leaves import leaves_of, named_leaves
from tracegrad.variables.modules import Survey, is_state, is_whole_or_variable


class States:
    """The states among the arguments of a function that is being traced, as they come in."""

    def __init__(self, arguments: Mapping[str, Any]):
        leaves = named_leaves(arguments, is_whole_or_variable)
        self._states = [(name, leaf) for name, leaf in leaves if is_state(leaf)]
        self._before: list[tuple[list[Any], Any]] = [
            jax.tree.flatten(state) for _, state in self._states
        ]

    def changes(self, result: Any) -> Changes:
        """What the function has changed in them that is not in its result either."""
        changes = Changes()
        if not self._states:
            return changes
        returned = set(map(id, Survey().flatten(result, [])[0]))
        for (name, state), (leaves, structure) in zip(self._states, self._before, strict=True):
            now, new_structure = jax.tree.flatten(state)
            if structure != new_structure:
                changes.structures.append(f"{name} (its structure)")
                continue
            for leaf, old, new in zip(leaves_of(state), leaves, now, strict=True):
                if old is not new and id(new) not in returned:
                    changes.paths.append(leaf.within(name).name)
                    changes.values.append((old, new))
        return changes


@dataclass
class Changes:
    """Paths of what was changed: parts of the structure; and arrays, before and after."""

    structures: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    values: list[tuple[Any, Any]] = field(default_factory=list)


def is_passed_on(before: Any, after: Any) -> bool:
    """Whether a value of a graph is another one, handed through calls of jitted functions."""
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
