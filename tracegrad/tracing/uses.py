"""`Use`: the Variables that a program reads and assigns, and which graphs the program can serve."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.tracing.packed import has_nnx_objects, has_non_arrays

Packs = Literal["never", "if it has non-arrays", "always"]
Refs = Sequence[weakref.ref[Any]]


class Use:
    """How a graph, or the program of several graphs, uses Variables, the host and the compiler.

    Attributes:
      updated, read, written: weak references to the Variables that are read and assigned, only
        read, only assigned.
      values: the Variables whose values the program takes.
      assigned: the Variables whose new values the program returns.
      calls_host: whether the program uses Variables and calls code that XLA did not compile.
      recomputes: whether the program must be compiled with options that keep recomputed code.
      is_plain: whether the program only takes the arguments and returns the result.
      is_over: whether a Variable is gone, so that the program cannot be called any more.
    """

    def __init__(
        self,
        values: Iterable[Any],
        assigned: Iterable[Any],
        *,
        calls_host: bool,
        recomputes: bool,
        is_plain: bool,
    ):
        self.is_over = False
        self.calls_host, self.recomputes, self.is_plain = calls_host, recomputes, is_plain
        taken, returned = dict.fromkeys(values), dict.fromkeys(assigned)
        me = weakref.ref(self)

        def over(_: object) -> None:
            if (use := me()) is not None:
                use.is_over = True

        self.updated: Refs = [weakref.ref(v, over) for v in returned if v in taken]
        self.read: Refs = [weakref.ref(v, over) for v in taken if v not in returned]
        self.written: Refs = [weakref.ref(v, over) for v in returned if v not in taken]
        self.values: Refs = (*self.updated, *self.read)
        self.assigned: Refs = (*self.updated, *self.written)
        self.has_variables = bool(self.values or self.written)

    @classmethod
    def of(cls, graph: Graph, packs: Packs) -> Use:
        """`packs`: which results are packed."""
        changes_state = bool(graph.variables or graph.assigned or graph.updates)
        is_other = has_nnx_objects if packs == "never" else has_non_arrays
        keeps = _jax.MERGES_RECOMPUTED and _jax.keep_recompute_options(jax.default_backend())
        return cls(
            graph.variables,
            graph.assigned,
            calls_host=changes_state and graph.calls_host,
            recomputes=bool(keeps) and graph.recomputes,
            is_plain=not changes_state and packs != "always" and not is_other(graph.out_tree),
        )

    def joined(self, other: Use) -> Use:
        """The use of a program that serves the graphs of both."""
        assigned, new = _alive(self.assigned), _alive(other.assigned)
        values = [*_alive(self.values), *_alive(other.values)]
        if not self.is_plain:
            # If only one of the two assigns a Variable, the Variable must also be an input: the
            # other returns its value unchanged.
            values += [v for v in assigned if v not in new] + [v for v in new if v not in assigned]
        return Use(
            values,
            [*assigned, *new],
            calls_host=self.calls_host or other.calls_host,
            recomputes=self.recomputes or other.recomputes,
            is_plain=self.is_plain and other.is_plain,
        )

    def serves(self, other: Use) -> bool:
        """Whether a program of this use takes and returns all values that `other` needs."""
        if other.recomputes and not self.recomputes:
            return False
        if self.is_plain:
            return other.is_plain
        return (
            _ids(self.values) >= _ids(other.values)
            and _ids(self.assigned) >= _ids(other.assigned) >= _ids(self.written)
            and self.calls_host >= other.calls_host
        )


def _alive(refs: Refs) -> dict[Any, None]:
    return {variable: None for ref in refs if (variable := ref()) is not None}


def _ids(refs: Refs) -> set[int]:
    return {id(ref()) for ref in refs}
