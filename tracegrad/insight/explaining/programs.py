"""The compiled programs of a run: one returns its values, others its cotangents.

Each also returns the arrays to be measured; NumPy computes the statistics. XLA does not optimise
the programs: each runs only a few times, so that compiling costs most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad.insight.explaining.collecting import Deferred, distinct
from tracegrad.insight.explaining.custom_rules import leaking_rules
from tracegrad.insight.explaining.cutting import key_of
from tracegrad.insight.explaining.detail import Detail, telling_inside
from tracegrad.insight.explaining.measuring import MeasuredPass
from tracegrad.insight.explaining.observed import Key
from tracegrad.ir import Graph, Occurrence
from tracegrad.ir.program_keys import PROGRAMS

# The result of a program, its statistics, and the refused nodes, as in `Observed`.
Answer = tuple[Any, Mapping[Key, np.ndarray[Any, Any]], Mapping[Occurrence, str]]


class Programs:
    """The programs that equal runs share."""

    def __init__(self, graph: Graph, detail: Detail):
        self.graph = graph
        self._pass = MeasuredPass(graph, detail)
        self._jitted: dict[Any, Callable[..., Any]] = {}
        # For each program: what makes the tree of its results, the refused nodes.
        self._layouts: dict[Any, Any] = {}
        # The pass has state during a trace. (Reentrant: traced code may call `explain`.)
        self._one_at_a_time = threading.RLock()

    def forward(self, args: Sequence[Any], is_kept: bool) -> Answer:
        """Returns the outputs of the run; if `is_kept`, also the values that its reverse pass
        needs, else None."""

        def run(args: Sequence[Any]) -> Any:
            outs, kept = self._pass.forward(self.graph, args, ())
            return outs, kept if is_kept else None

        return self._run("forward", run, list(args))

    def backward(
        self,
        args: Sequence[Any],
        kept: Any,
        given: Sequence[Any],
        wanted: tuple[bool, ...],
        has_run: bool,
    ) -> Answer:
        """Returns the outputs of the run (None if it `has_run`), and the cotangents of the wanted
        inputs. If `kept` is None, it computes the values that the reverse pass needs again: XLA
        then fuses them into that pass."""

        def run(args: Sequence[Any], kept: Any, given: Sequence[Any]) -> Any:
            outs = None
            if not has_run:
                outs, kept = self._pass.forward(self.graph, args, ())
            elif kept is None:
                with self._pass.mute():
                    _, kept = self._pass.forward(self.graph, args, ())
            return outs, self._pass.backward(self.graph, kept, given, wanted, ())

        key = has_run, wanted, tuple(ct is not None for ct in given)
        return self._run(key, run, list(args), kept, list(given))

    @property
    def has_run(self) -> bool:
        """Whether `forward` has run."""
        return "forward" in self._jitted

    def _run(self, key: Any, run: Callable[..., Any], *args: Any) -> Answer:
        """Runs a compiled pass, and computes its statistics."""
        measured = self._pass

        def packed(*args: Any) -> list[Any]:
            measured.refused.clear()
            measured.refused.update(measured.leaking)
            with measured.collecting(steps=()) as found:
                leaves, expand = distinct((run(*args), found))
            self._layouts[key] = expand, dict(measured.refused)
            return leaves

        with self._one_at_a_time:
            if key not in self._jitted:
                self._jitted[key] = _compiled(packed)
            try:
                leaves = self._jitted[key](*args)
            except jax.errors.UnexpectedTracerError:
                # A rule has an array of an ended trace in nondiff_argnums. JAX says so only now.
                if measured.leaking or not (leaking := leaking_rules(self.graph)):
                    raise
                measured.leaking.update(leaking)
                self._jitted[key] = _compiled(packed)
                leaves = self._jitted[key](*args)
            expand, refused = self._layouts[key]
            keys = measured.keys
        result, found = expand(leaves)
        stats = {keys[number]: _statistic(found[number]) for number in sorted(found)}
        return result, stats, refused


def _compiled(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    options = _jax.quick_options(jax.default_backend())
    # A new function: JAX caches traces by the identity of the function.
    compiled: Callable[..., list[Any]] = jax.jit(lambda *args: run(*args), compiler_options=options)
    return compiled


def _statistic(found: Any) -> np.ndarray[Any, Any]:
    return np.asarray(found.measure(*found.args) if isinstance(found, Deferred) else found)


def programs_of(graph: Graph, detail: Detail) -> Programs:
    measured = telling_inside(graph) if detail is Detail.FEW else detail
    key = "explained", measured, key_of(graph)
    known: Programs | None = PROGRAMS.get(key)
    return PROGRAMS.put(key, Programs(graph, detail)) if known is None else known
