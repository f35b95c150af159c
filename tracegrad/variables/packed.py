"""Arguments as a warm call hands them to jit: each the list of its arrays, and what it was.

jit takes its arguments apart at every call. Models answer slowly: each of their classes does it in
Python, and before that what is no array would have to be found, and the whole be put together
again with that replaced. So each is taken apart once, looked up, and handed on flat.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from tracegrad.variables.modules import PathKey
from tracegrad.variables.statics import (
    Static,
    fix,
    is_kind_of_array,
    is_variable,
    settings,
    structure_with,
)
from tracegrad.variables.trees import Fixed, flattened, given, with_variables

_KEPT = 256  # layouts of a function, and structures of a layout
_IMMUTABLE = frozenset({str, bytes, type, np.dtype})


class Packed:
    """The arrays of one argument, and its structure, of which what is no array is a part."""

    __slots__ = ("arrays", "structure")

    def __init__(self, arrays: Sequence[Any], structure: Any):
        self.arrays = arrays
        self.structure = structure

    def argument(self) -> Any:
        """The argument as it was."""
        return with_variables(self.structure, self.arrays)


def _flatten_with_paths(packed: Packed) -> tuple[Iterable[tuple[PathKey, Any]], Any]:
    places = jax.tree_util.tree_leaves_with_path(packed.argument(), is_leaf=is_variable)
    arrays, paths = iter(packed.arrays), list[PathKey]()
    array = next(arrays, None)
    for keys, leaf in places:  # what is no array is among them
        if leaf is array:
            paths.append(PathKey(jax.tree_util.keystr(keys)))
            array = next(arrays, None)
    return list(zip(paths, packed.arrays, strict=True)), packed.structure


jax.tree_util.register_pytree_with_keys(
    Packed,
    _flatten_with_paths,
    lambda structure, arrays: Packed(list(arrays), structure),
    operator.attrgetter("arrays", "structure"),
)


def unpacked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """The arguments of a call as the caller wrote them, but for what JAX has put in the places of
    arrays."""
    return (
        tuple([arg.argument() if type(arg) is Packed else arg for arg in args]),
        {k: arg.argument() if type(arg) is Packed else arg for k, arg in kwargs.items()},
    )


class Packing:
    """Packs the arguments of one function, and remembers what they are made of."""

    def __init__(self) -> None:
        self._layouts: dict[Any, _Layout] = {}

    def __call__(self, argument: Any, found: list[Fixed]) -> Any:
        """The argument packed, or itself, if it is an array; its Variables are added to `found`."""
        if is_kind_of_array(type(argument)):
            return argument
        leaves, tree, variables = flattened(argument)
        if variables:
            found += variables
        kinds = tuple(map(type, leaves))
        try:
            layout = self._layouts.get((tree, kinds))
        except Exception:  # something in it has no hash or no equality: jit says what
            return given(argument)[0]
        if layout is None:
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            layout = self._layouts[tree, kinds] = _Layout(kinds, tree)
        if not layout.others:
            return Packed(leaves, tree)
        key = tuple([id(leaves[i]) for i in layout.others])
        structure, is_array = layout.known.get(key) or layout.find(key, leaves, tree)
        return Packed(list(itertools.compress(leaves, is_array)), structure)


class _Layout:
    """Arguments of one structure, as JAX sees it, with leaves of the same types.

    Attributes:
      others: the indices of leaves that may be no arrays.
      known: the structure, and which leaves are arrays, by the identity of these objects.
    """

    def __init__(self, kinds: Sequence[type], tree: Any):
        numbers = settings(kinds, tree)
        self.others = [
            i for i, kind in enumerate(kinds) if not is_kind_of_array(kind) or i in numbers
        ]
        self.known: dict[tuple[int, ...], tuple[Any, list[bool]]] = {}
        # Then the same objects make the same structure.
        others: list[Any] = [kinds[i] for i in self.others if i not in numbers]
        self._never_changes = all(
            kind.__eq__ is object.__eq__ or kind in _IMMUTABLE for kind in others
        )
        self._refs: list[weakref.ref[Any]] = []

    def find(self, key: tuple[int, ...], leaves: list[Any], tree: Any) -> tuple[Any, list[bool]]:
        fixed = list(leaves)
        if not fix(fixed, tree):  # with tracers in it, or fixed before
            return tree, [True] * len(leaves)
        is_array = [type(leaf) is not Static for leaf in fixed]
        structure = structure_with(tree, fixed)
        if self._never_changes and not any(is_array[i] for i in self.others):
            if len(self.known) >= _KEPT:
                self.known.clear()
                self._refs.clear()
            known = self.known
            # Whenever one of them goes, the entry does, before another has its identity. What
            # cannot be held weakly, the structure holds.
            self._refs = [ref for ref in self._refs if ref() is not None]
            for i in self.others:
                with suppress(TypeError):
                    self._refs.append(weakref.ref(leaves[i], lambda _: known.pop(key, None)))
            known[key] = structure, is_array
        return structure, is_array
