"""The variants of a function that are known, and which of them a call is most likely.

What decides is known when a call is traced, not before. So it is the one that calls like it were
the last time: by the types of the arguments, or, where all calls with the same Variables were one
variant, by these alone, which costs nothing to ask.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from tracegrad.tracing.static import StaticArguments
from tracegrad.tracing.variants import Use, Variant
from tracegrad.variables.trees import Fixed

if TYPE_CHECKING:
    from tracegrad.tracing.pipeline import Pipeline

_KEPT_VARIANTS = 64
_KEPT_SIGNATURES = 1024


class KnownVariants:
    """Those of one function.

    Attributes:
      only: the one variant, while there is one, by the structure of modules and the Variables that
        a call is given.
    """

    def __init__(self) -> None:
        self._all: OrderedDict[Any, Variant] = OrderedDict()  # by identity, last used last
        self._by_signature: OrderedDict[Any, Variant] = OrderedDict()
        self.only: OrderedDict[tuple[Fixed, ...], Variant | None] = OrderedDict()
        self._lock = threading.RLock()

    def likely(self, variables: tuple[Fixed, ...], key: Any) -> Variant | None:
        """What such arguments had the last time, or the only one that there is. No other: to try
        one reads its Variables, as a tape would notice.

        Args:
          key: the `signature` of the arguments.
        """
        with self._lock:
            for variant in (self._by_signature.get(key), self.only.get(variables)):
                if variant is not None and not variant.use.is_over:
                    return variant
        return None

    def of(self, pipeline: Pipeline, use: Use) -> Variant:
        """The variant for a use; a new one if there is none."""
        with self._lock:
            variant = self._all.get(use.identity)
            if variant is None or variant.use.is_over or not variant.use.serves(use):
                variant = Variant(pipeline, use)
                self._forget(lambda other: other.use.is_over or use.serves(other.use))
                self._all[use.identity] = variant
            return variant

    def remember(self, variant: Variant, variables: tuple[Fixed, ...], key: Any) -> bool:
        """Notes of what variant a call was. Returns whether there is no other, and it is called
        with the arguments alone."""
        with self._lock:
            self._all[variant.use.identity] = variant
            self._all.move_to_end(variant.use.identity)
            if len(self._all) > _KEPT_VARIANTS:
                oldest = next(iter(self._all.values()))
                self._forget(lambda other: other is oldest)
            known = self.only.get(variables, variant)
            is_only = known is not None and (known is variant or known.direct is not None)
            self.only[variables] = variant if is_only else None
            if len(self.only) > _KEPT_VARIANTS:
                self.only.popitem(last=False)
            if variant.direct is not None and len(self._all) == 1:
                return True
            self._by_signature[key] = variant
            if len(self._by_signature) > _KEPT_SIGNATURES:
                self._by_signature.popitem(last=False)
            return False

    def _forget(self, unwanted: Callable[[Variant], bool]) -> None:
        for table in (self._all, self._by_signature, self.only):
            entries: dict[Any, Any] = table
            for key, variant in list(entries.items()):
                if variant is not None and unwanted(variant):
                    del entries[key]

    def clear(self) -> None:
        """Forgets every program."""
        with self._lock:
            for variant in self._all.values():
                variant.clear_cache()
            self._all.clear()
            self._by_signature.clear()
            self.only.clear()


def signature(static: StaticArguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What decides which variant a call is, as far as it can be said cheaply; or None."""
    dynamic, positions, static_kwargs = static.apart(args, kwargs)
    flat, tree = jax.tree.flatten(dynamic)
    try:
        types = tuple(map(jax.typeof, flat))
        key = tree, types, tuple(args[i] for i in positions), tuple(static_kwargs.items())
        hash(key)
    except Exception:  # jit says what is wrong with it
        return None
    return key
