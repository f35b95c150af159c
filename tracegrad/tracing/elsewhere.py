"""A call that is made again, because it went to jit's own callable and is of another variant."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegrad import _jax


@jax.tree_util.register_pytree_node_class
class Elsewhere:
    """In the place of a result, the arguments of a call that another variant has to make. When it
    is handed out, with values in the places of arguments, the call is made, and is the result.

    For the call of a function that turns out to be of another variant although earlier calls were
    not: it went to jit's own callable, so that there is no other place to go on from.
    """

    def __init__(self, arrays: Sequence[Any], call: _Call):
        self._arrays = arrays
        self._call = call

    @classmethod
    def of(cls, again: Callable[..., Any], arguments: Any, found: Any) -> Elsewhere:
        """`again`: the method that makes the call, of arguments and what is found of it (or None);
        whose it is is held weakly."""
        leaves, tree = jax.tree.flatten(arguments)
        is_array = [_jax.is_tracer(leaf) for leaf in leaves]
        arrays = [leaf for leaf, traced in zip(leaves, is_array, strict=True) if traced]
        fixed = [None if traced else leaf for leaf, traced in zip(leaves, is_array, strict=True)]
        call = _Call(weakref.WeakMethod(again), tree, is_array, fixed, found)
        return cls([*arrays, jax.numpy.zeros(())], call)  # the last tells values from places

    def tree_flatten(self) -> tuple[Sequence[Any], _Call]:
        return self._arrays, self._call

    @classmethod
    def tree_unflatten(cls, call: _Call, arrays: Sequence[Any]) -> Any:
        if not all(isinstance(array, jax.Array) for array in arrays) or call.is_made(arrays[-1]):
            return cls(arrays, call)
        return call(arrays)


@dataclasses.dataclass(eq=False)
class _Call:
    """A call, but for the arrays among its arguments."""

    again: weakref.WeakMethod[Callable[..., Any]]
    tree: Any
    is_array: list[bool]
    fixed: list[Any]
    found: Any  # for the first time
    made: list[weakref.ref[Any]] = dataclasses.field(default_factory=list)

    def is_made(self, last: Any) -> bool:
        """Whether the call was made, and JAX only looks what the results are like: by the last
        array, which is a new one each time."""
        self.made[:] = [ref for ref in self.made if ref() is not None]
        return any(ref() is last for ref in self.made)

    def __call__(self, arrays: Sequence[Any]) -> Any:
        self.made.append(weakref.ref(arrays[-1]))
        again, found, self.found = self.again(), self.found, None
        assert again is not None, "the traced function that is called holds it"
        rest = iter(arrays)
        leaves = [next(rest) if a else x for a, x in zip(self.is_array, self.fixed, strict=True)]
        return again(*jax.tree.unflatten(self.tree, leaves), found)
