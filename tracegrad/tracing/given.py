"""Variables among the arguments of traced functions: inside they are the Variables that they are.

To JAX such a Variable is no array but a part of the arguments' structure (`Given`), so that there
is a program for each that is given; in the function it is read and assigned like one that the
function closes over.

JAX takes Variables apart by itself where a call goes to it directly, which is where no call had any
before. The traced values in their places then tell whose they are, once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from tracegrad.ir.engine import engine
from tracegrad.variables.variable import Variable, is_variable, whose

T = TypeVar("T")


class Given:
    """A Variable among arguments: a node of their tree, without leaves. There is one of each."""

    __slots__ = ("__weakref__", "_ref", "_text")

    def __init__(self, variable: Variable):
        # JAX's caches keep it, and may not keep the Variable.
        self._ref = weakref.ref(variable)
        self._text = f"<Variable {variable.name}>"

    @property
    def variable(self) -> Variable:
        variable = self._ref()
        assert variable is not None, "the caller of the function holds it"
        return variable

    @property
    def is_gone(self) -> bool:
        return self._ref() is None

    def __repr__(self) -> str:
        return self._text


jax.tree_util.register_pytree_node(Given, lambda given: ((), given), lambda given, _: given)


def is_given(leaf: object) -> bool:
    """Whether a leaf stands for a Variable."""
    return isinstance(leaf, Given)


def given(arguments: T) -> T:
    """Arguments with Variables as parts of their structure; the same object if there are none."""
    return _replaced(arguments, _itself)[0]


def with_those_given(arguments: T) -> tuple[T, tuple[Given, ...]]:
    """`given`, and the Variables that there are, in order."""
    return _replaced(arguments, _itself)


def given_before(arguments: T) -> T:
    """Arguments as JAX hands them to the function that it traces; what was a Variable when the
    function was called is one again, as in `given`."""
    return _replaced(arguments, lambda leaf: _itself(leaf) or whose(leaf))[0]


def those_given(arguments: Any) -> tuple[Given, ...]:
    """The Variables that are parts of the structure of arguments, in order."""
    return tuple(filter(is_given, jax.tree.leaves(arguments, is_leaf=is_given)))


def taken(arguments: T) -> T:
    """Arguments with the Variables themselves, for the user's function."""
    leaves, tree = jax.tree.flatten(arguments, is_leaf=is_given)
    if not any(map(is_given, leaves)):
        return arguments
    new: T = jax.tree.unflatten(tree, [x.variable if is_given(x) else x for x in leaves])
    return new


def _itself(leaf: Any) -> Variable | None:
    return leaf if isinstance(leaf, Variable) else None


def _replaced(
    arguments: T, variable_of: Callable[[Any], Variable | None]
) -> tuple[T, tuple[Given, ...]]:
    leaves, tree = jax.tree.flatten(arguments, is_leaf=is_variable)
    found = []
    for i, leaf in enumerate(leaves):
        variable = variable_of(leaf)
        if variable is not None:
            if variable._given is None:
                variable._given = Given(variable)
            leaves[i] = variable._given
            found.append(variable._given)
    return (jax.tree.unflatten(tree, leaves) if found else arguments), tuple(found)


engine.given = given
