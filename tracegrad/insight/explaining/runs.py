"""Measures a graph in runs (of neighbouring operations); equal runs share compiled programs.

A run has two programs: one returns its values, the other its cotangents. Both also return the
arrays to be measured; NumPy computes the statistics. XLA does not optimise the programs: each runs
only a few times, so that compiling costs most. The forward pass keeps the values that cross between
runs. The reverse pass recomputes the values of one run at a time. The last run is one program: the
cotangents of its results are known before it runs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.differentiation.pull_back import reached_from
from tracegrad.insight.explaining.collecting import Deferred, distinct
from tracegrad.insight.explaining.custom_rules import refuse_closed_over
from tracegrad.insight.explaining.cutting import is_large_call, key_of, runs_of
from tracegrad.insight.explaining.detail import Detail, telling_inside
from tracegrad.insight.explaining.measuring import MeasuredPass, of_cotangent
from tracegrad.insight.explaining.observed import Key, Observed, Places
from tracegrad.insight.explaining.statistics import exact
from tracegrad.ir import (
    Atom,
    CustomGradient,
    Graph,
    Node,
    Occurrence,
    Origin,
    Value,
    dtype_of,
    has_gradient,
)
from tracegrad.ir.occurrence import Path
from tracegrad.ir.program_keys import PROGRAMS
from tracegrad.rewriting.kept_zeros import keeps_zeros


def measure(
    graph: Graph,
    sources: Sequence[bool],
    inputs: Sequence[Any],
    seeds: Sequence[Any],
    detail: Detail,
) -> Observed:
    """Measures a graph in a forward and a reverse pass.

    Args:
      graph: a traced function.
      sources: for each input whether it gets a cotangent.
      inputs: the arrays of the inputs.
      seeds: for each output its cotangent, or None.
      detail: how much to measure.
    """
    found = _Measured(detail)
    # JAX's own checks would raise at the NaN that is to be explained.
    with jax.debug_nans(False), jax.debug_infs(False):
        level = _Level(found, graph, ())
        level.seed(seeds, sources)
        outs, cotangents = level.forward(inputs), level.backward()
        found.note_each("source", cotangents)
        if detail is Detail.ALL:
            found.note_each("input", inputs)
        found.note_each("output", outs)
    return Observed(graph, detail, found.stats, found.refused, found.lines)


class _Measured:
    """The statistics measured so far; `detail` as for `measure`."""

    def __init__(self, detail: Detail):
        self.detail = detail
        self.walk = Walk()
        self.stats: dict[Key, np.ndarray[Any, Any]] = {}
        self.refused: dict[Occurrence, str] = {}
        self.lines: dict[Occurrence, Origin] = {}

    def note_each(self, kind: str, arrays: Sequence[Any]) -> None:
        """Measures inputs or outputs of the graph."""
        for k, array in enumerate(arrays):
            if array is not None and _jax.is_inexact(jax.typeof(array).dtype):
                self.stats[kind, None, k] = np.asarray(exact(array))


class _Level:
    """A graph at a path, measured item by item. An item is a run, or a large call with a level of
    its own.

    `values` holds the values that cross between items, until the reverse pass has used them.
    """

    def __init__(self, measured: _Measured, graph: Graph, path: Path):
        self.measured = measured
        self.graph = graph
        self.path = path
        self.items: list[_Call | _Run] = []
        self.values: dict[Value, Any] = {}
        self.cotangents: dict[Value, Any] = {}
        self.wanted: Sequence[Value] = ()
        self.reached: Collection[Value] = ()
        self.last_pulled: list[Any] | None = None
        for is_large, group in itertools.groupby(graph.nodes, is_large_call):
            nodes = tuple(group)
            if is_large:
                self.items += [_Call(self, node) for node in nodes]
                continue
            for is_eager, part in itertools.groupby(nodes, self._is_eager):
                few = tuple(part)
                runs = [few] if is_eager else runs_of(few, measured.detail)
                self.items += [_Run(self, tuple(run), is_eager) for run in runs]

    def _is_eager(self, node: Node) -> bool:
        """Whether a node runs by itself, uncompiled: only then the line of a NaN in a custom rule
        can be found."""
        if self.measured.detail is not Detail.ALL or not isinstance(node, CustomGradient):
            return False
        return node.kind == "vjp" and not keeps_zeros(node)

    def forward(self, args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of the graph. If it has got `seed`, the last item also computes its
        cotangents: then XLA computes the values of a last run once."""
        self.values = {**self.graph.constants, **dict(zip(self.graph.inputs, args, strict=True))}
        for item in self.items:
            operands = _read(item.inputs, self.values)
            if item is self.items[-1] and (pulled := self._given_and_asked(item)):
                results, self.last_pulled = item.forward_and_backward(operands, *pulled)
            else:
                results = item.forward(operands)
            self.values.update(zip(item.outputs, results, strict=True))
        return _read(self.graph.outputs, self.values)

    def seed(self, cotangents: Sequence[Any], wanted: Sequence[bool]) -> None:
        """Takes the cotangents of the outputs, and for which inputs `backward` is asked."""
        self.wanted = [v for v, chosen in zip(self.graph.inputs, wanted, strict=True) if chosen]
        self.reached = reached_from(self.graph, self.wanted, self.measured.walk)
        refuse_closed_over(self.measured.refused, self.graph, self.reached, self.path)
        self._add(self.graph.outputs, cotangents)

    def backward(self) -> list[Any]:
        """Returns the cotangents of the wanted inputs of the graph; None for inputs without one."""
        for item in reversed(self.items):
            if pulled := self._given_and_asked(item):
                terms, self.last_pulled = self.last_pulled, None
                if terms is None:
                    terms = item.backward(_read(item.inputs, self.values), *pulled)
                self._add(item.inputs, terms)
            for value in item.outputs:
                self.values.pop(value, None)
                self.cotangents.pop(value, None)
        return [self.cotangents.get(v) if v in self.wanted else None for v in self.graph.inputs]

    def _add(self, values: Sequence[Atom], terms: Sequence[Any]) -> None:
        known = self.cotangents
        for value, term in zip(values, terms, strict=True):
            if term is not None and isinstance(value, Value) and has_gradient(value):
                known[value] = _sum(known[value], term) if value in known else term

    def _given_and_asked(self, item: _Call | _Run) -> tuple[list[Any], tuple[bool, ...]] | None:
        """Returns the cotangents of an item's outputs, and for each input whether a cotangent is
        wanted; None if there is no such cotangent, or no such input."""
        given = [self.cotangents.get(v) for v in item.outputs]
        asked = tuple(isinstance(v, Value) and v in self.reached for v in item.inputs)
        flows = any(asked) and any(ct is not None for ct in given)
        return (given, asked) if flows else None


class _Call:
    """A node that calls one region with many operations (`is_large_call`)."""

    def __init__(self, level: _Level, node: Node):
        self.here = Occurrence(level.path, node)
        self.inputs: Sequence[Atom] = node.inputs
        self.outputs: Sequence[Value] = node.outputs
        self.measured = level.measured
        ((name, region),) = node.regions.items()
        self.level = _Level(level.measured, region, self.here.into(name))

    def forward(self, args: Sequence[Any]) -> list[Any]:
        return self.level.forward(args)

    def backward(
        self, args: Sequence[Any], given: Sequence[Any], wanted: Sequence[bool]
    ) -> list[Any]:
        self._seed(given, wanted)
        return self.level.backward()

    def forward_and_backward(
        self, args: Sequence[Any], given: Sequence[Any], wanted: Sequence[bool]
    ) -> tuple[list[Any], list[Any]]:
        self._seed(given, wanted)
        return self.level.forward(args), self.level.backward()

    def _seed(self, given: Sequence[Any], wanted: Sequence[bool]) -> None:
        for k, ct in enumerate(given):
            if ct is not None:
                statistic = of_cotangent(self.measured.detail)(ct)
                self.measured.stats["ct", self.here, k] = np.asarray(statistic)
        self.level.seed(given, wanted)


class _Run:
    """Neighbouring operations that are compiled together."""

    def __init__(self, level: _Level, nodes: Sequence[Node], is_eager: bool):
        made = {v for node in nodes for v in node.outputs}
        users, members = level.graph.users, set(nodes)
        self.nodes, self.path, self.measured = nodes, level.path, level.measured
        self.inputs = list(dict.fromkeys(v for n in nodes for v in n.operands if v not in made))
        self.outputs = [
            v
            for node in nodes
            for v in node.outputs
            if v in level.graph.results or any(u not in members for u in users.get(v, ()))
        ]
        program = _jax.program_of(
            level.graph.program,
            constants={},
            inputs=self.inputs,
            outputs=self.outputs,
            equations=[node.equation for node in nodes],
        )
        graph = Graph(program=program, nodes=tuple(nodes), name=level.graph.name)
        self.programs = _programs_of(graph, level.measured.detail, is_eager)
        # Effects must happen once, so that the values of such a run are not recomputed.
        self.is_kept = any(node.effects for node in nodes)
        self.kept: Any = None

    def forward(self, args: Sequence[Any]) -> list[Any]:
        outs, self.kept = self._take(self.programs.forward(args, self.is_kept))
        return list(outs)

    def backward(
        self, args: Sequence[Any], given: Sequence[Any], wanted: tuple[bool, ...]
    ) -> list[Any]:
        kept, self.kept = self.kept, None
        return list(self._take(self.programs.backward(args, kept, given, wanted))[1])

    def forward_and_backward(
        self, args: Sequence[Any], given: Sequence[Any], wanted: tuple[bool, ...]
    ) -> tuple[list[Any], list[Any]]:
        if self.programs.has_run:  # an equal run has compiled the two programs
            return self.forward(args), self.backward(args, given, wanted)
        answer = self.programs.backward(args, None, given, wanted, has_run=False)
        outs, cotangents = self._take(answer)
        return list(outs), list(cotangents)

    def _take(self, answer: _Answer) -> Any:
        """Returns the result of a program, and notes what it has measured, under the nodes of this
        run (the program may have been traced from an equal run)."""
        result, stats, refused, lines = answer
        place = Places(self.programs.graph.nodes, self.nodes, self.path)
        for (kind, here, k), stat in stats.items():
            self.measured.stats[kind, here and place.of(here), k] = stat
        for here, words in refused.items():
            self.measured.refused.setdefault(place.of(here), words)
        self.measured.lines.update((place.of(here), line) for here, line in lines.items())
        return result


# ---------------------------------------------------------------------------- the programs of a run

# The result of a program, and its statistics, refused nodes and lines, as in `Observed`.
_Answer = tuple[
    Any,
    Mapping[Key, np.ndarray[Any, Any]],
    Mapping[Occurrence, str],
    Mapping[Occurrence, Origin],
]


class _Programs:
    """The programs that equal runs share."""

    def __init__(self, graph: Graph, detail: Detail, is_eager: bool):
        self.graph = graph
        self._pass = MeasuredPass(graph, detail)
        self._is_eager = is_eager
        self._jitted: dict[Any, Callable[..., Any]] = {}
        # For each program: what makes the tree of its results, the refused nodes.
        self._layouts: dict[Any, Any] = {}
        # The pass has state during a trace. (Reentrant: traced code may call `explain`.)
        self._one_at_a_time = threading.RLock()

    def forward(self, args: Sequence[Any], is_kept: bool) -> _Answer:
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
        has_run: bool = True,
    ) -> _Answer:
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

    def _run(self, key: Any, run: Callable[..., Any], *args: Any) -> _Answer:
        """Runs a pass, compiled unless the run is eager, and computes its statistics."""
        measured = self._pass

        def observed(*args: Any) -> Any:
            measured.refused.clear()
            measured.lines.clear()
            with measured.collecting(None if self._is_eager else ()) as found:
                return run(*args), found

        def packed(*args: Any) -> list[Any]:
            leaves, expand = distinct(observed(*args))
            self._layouts[key] = expand, dict(measured.refused)
            return leaves

        with self._one_at_a_time:
            if self._is_eager:
                result, found = observed(*args)
                refused, lines = dict(measured.refused), dict(measured.lines)
            else:
                if key not in self._jitted:
                    options = _jax.quick_options(jax.default_backend())
                    self._jitted[key] = jax.jit(packed, compiler_options=options)
                leaves = self._jitted[key](*args)
                expand, refused = self._layouts[key]
                result, found = expand(leaves)
                lines = {}
            keys = measured.keys
        stats = {keys[number]: _statistic(found[number]) for number in sorted(found)}
        return result, stats, refused, lines


def _statistic(found: Any) -> np.ndarray[Any, Any]:
    return np.asarray(found.measure(*found.args) if isinstance(found, Deferred) else found)


def _programs_of(graph: Graph, detail: Detail, is_eager: bool) -> _Programs:
    if is_eager:
        return _Programs(graph, detail, is_eager)
    measured = telling_inside(graph) if detail is Detail.FEW else detail
    key = "explained", measured, key_of(graph)
    known: _Programs | None = PROGRAMS.get(key)
    return PROGRAMS.put(key, _Programs(graph, detail, is_eager)) if known is None else known


# --------------------------------------------------------------------------------------- operations


def _read(atoms: Sequence[Atom], values: Mapping[Value, Any]) -> list[Any]:
    return [
        values[atom] if isinstance(atom, Value) else np.asarray(atom.val, dtype_of(atom))
        for atom in atoms
    ]


def _sum(one: Any, other: Any) -> Any:
    """Adds two arrays, by NumPy if this process has all of both: XLA would compile a program for
    every shape."""
    if all(getattr(x, "is_fully_addressable", True) for x in (one, other)):
        return np.asarray(one) + np.asarray(other)
    return one + other
