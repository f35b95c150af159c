"""`Use`: the Variables that a program reads and assigns, and the graphs that it can serve."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.variables.packed import has_non_arrays
from tracegrad.variables.results import has_nnx_objects

Packs = Literal["never", "if it has non-arrays", "always"]


class Use:
    """How a program uses Variables, the host and the compiler.

    Attributes:
      updated, read, written: weak references to the Variables that the program reads and assigns,
        only reads, only assigns.
      values: the Variables whose values the program takes.
      assigned: the Variables whose new values the program returns.
      calls_host: whether the program uses Variables and calls code that XLA did not compile.
      recomputes: whether the program must be compiled with options that keep recomputed code.
      is_plain: whether the program only takes the arguments and returns the result.
      is_over: whether a Variable is gone, so that the program cannot be called any more.
    """

    def __init__(
        self,
        before: Use | None = None,
        graph: Graph | None = None,
        *,
        packs: Packs = "if it has non-arrays",
    ):
        """Makes the use of a program that also serves `graph`.

        Args:
          before: the use of the program so far.
          packs: which results are packed.
        """
        self.is_over: bool = False
        self.calls_host: bool = before is not None and before.calls_host
        self.recomputes: bool = before is not None and before.recomputes
        self.is_plain: bool = before is None or before.is_plain
        read: dict[Any, None] = {} if before is None else _alive(before.values)
        assigned: dict[Any, None] = {}
        if before is not None:
            assigned = _alive((*before.updated, *before.written))
        if graph is not None:
            # If only one of the traces assigns a Variable, the Variable must also be an input: the
            # other trace returns its value unchanged.
            if before is not None and not before.is_plain:
                named = {*map(id, graph.assigned)}
                read |= {v: None for v in assigned if id(v) not in named}
                read |= {v: None for v in graph.assigned if v not in assigned}
            read |= dict.fromkeys(graph.variables)
            assigned |= dict.fromkeys(graph.assigned)
            self.calls_host = self.calls_host or _calls_host(graph)
            self.recomputes = self.recomputes or _must_keep_recomputed(graph)
            self.is_plain = self.is_plain and _is_plain(graph, packs)
        self.updated: Sequence[weakref.ref[Any]]
        self.read: Sequence[weakref.ref[Any]]
        self.written: Sequence[weakref.ref[Any]]
        self.updated, self.read, self.written = self._weakly(
            [v for v in assigned if v in read],
            [v for v in read if v not in assigned],
            [v for v in assigned if v not in read],
        )
        self.values: Sequence[weakref.ref[Any]] = (*self.updated, *self.read)
        self.assigned: Sequence[weakref.ref[Any]] = (*self.updated, *self.written)
        self.has_variables = bool(self.values or self.written)

    def _weakly(self, *groups: Sequence[Any]) -> list[list[weakref.ref[Any]]]:
        """As soon as a Variable is gone, the use is over."""
        me = weakref.ref(self)

        def over(_: object) -> None:
            use = me()
            if use is not None:
                use.is_over = True

        return [[weakref.ref(each, over) for each in group] for group in groups]

    def serves(self, graph: Graph, packs: Packs) -> bool:
        """Whether a program of this use takes and returns all values that a graph needs."""
        if not self.recomputes and _must_keep_recomputed(graph):
            return False
        if self.is_plain:
            return _is_plain(graph, packs)
        values, written = ({id(ref()) for ref in refs} for refs in (self.values, self.written))
        updated = {id(ref()) for ref in self.updated}
        assigned = {*map(id, graph.assigned)}
        return (
            values.issuperset(map(id, graph.variables))
            and assigned.issubset(updated | written)
            and written.issubset(assigned)
            and (self.calls_host or not _calls_host(graph))
        )


def _alive(refs: Sequence[weakref.ref[Any]]) -> dict[Any, None]:
    return {variable: None for ref in refs if (variable := ref()) is not None}


def _calls_host(graph: Graph) -> bool:
    return not _is_plain(graph, "never") and bool(graph.calls_host)


def _must_keep_recomputed(graph: Graph) -> bool:
    needed = _jax.MERGES_RECOMPUTED and _jax.keep_recompute_options(jax.default_backend())
    return bool(needed) and graph.recomputes


def _is_plain(graph: Graph, packs: Packs) -> bool:
    if graph.variables or graph.assigned or graph.updates or packs == "always":
        return False
    return not (has_nnx_objects if packs == "never" else has_non_arrays)(graph.out_tree)
