"""Measures a graph in runs (of neighbouring operations); equal runs share compiled programs.

A run has two programs: one returns its values, the other its cotangents. Both also return the
arrays to be measured; NumPy computes the statistics. XLA does not optimise the programs: each runs
only a few times, so that compiling costs most. The forward pass keeps the values that cross between
runs. The reverse pass recomputes the values of one run at a time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.differentiation.pull_back import reached_from
from tracegrad.insight.explaining.collecting import Deferred
from tracegrad.insight.explaining.custom_rules import refuse_closed_over
from tracegrad.insight.explaining.cutting import LIMIT, runs_of
from tracegrad.insight.explaining.detail import Detail, telling_inside
from tracegrad.insight.explaining.measuring import MeasuredPass, of_cotangent
from tracegrad.insight.explaining.observed import Key, Observed
from tracegrad.insight.explaining.statistics import exact
from tracegrad.insight.explaining.visits import is_called, is_entered
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
from tracegrad.ir.authors import is_jaxs_rule
from tracegrad.ir.occurrence import Path
from tracegrad.ir.program_keys import PROGRAMS, program_key, rule_key
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
        outs = level.forward(list(inputs))
        cotangents = level.backward(list(seeds), sources)
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
        for is_large, group in itertools.groupby(graph.nodes, _is_large_call):
            nodes = tuple(group)
            if is_large:
                self.items += [_Call(self, node) for node in nodes]
                continue
            for is_eager, part in itertools.groupby(nodes, self._is_eager):
                few = tuple(part)
                runs = [few] if is_eager else runs_of(few)
                self.items += [_Run(self, tuple(run), is_eager) for run in runs]

    def _is_eager(self, node: Node) -> bool:
        """Whether a node runs by itself, uncompiled: only then the line of a NaN in a custom rule
        can be found."""
        if self.measured.detail is not Detail.ALL or not isinstance(node, CustomGradient):
            return False
        return node.kind == "vjp" and not keeps_zeros(node)

    def forward(self, args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of the graph."""
        self.values = {**self.graph.constants, **dict(zip(self.graph.inputs, args, strict=True))}
        for item in self.items:
            results = item.forward(_read(item.inputs, self.values))
            self.values.update(zip(item.outputs, results, strict=True))
        return _read(self.graph.outputs, self.values)

    def backward(self, cotangents: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
        """Returns the cotangents of the wanted inputs of the graph; None for inputs without one."""
        inputs = [v for v, chosen in zip(self.graph.inputs, wanted, strict=True) if chosen]
        reached = reached_from(self.graph, inputs, self.measured.walk)
        refuse_closed_over(self.measured.refused, self.graph, reached, self.path)
        found: dict[Value, Any] = {}

        def add(values: Sequence[Atom], terms: Sequence[Any]) -> None:
            for value, term in zip(values, terms, strict=True):
                if term is not None and isinstance(value, Value) and has_gradient(value):
                    found[value] = _sum(found[value], term) if value in found else term

        add(self.graph.outputs, cotangents)
        for item in reversed(self.items):
            given = [found.get(v) for v in item.outputs]
            asked = tuple(isinstance(v, Value) and v in reached for v in item.inputs)
            if any(asked) and any(ct is not None for ct in given):
                operands = _read(item.inputs, self.values)
                add(item.inputs, item.backward(operands, given, asked))
            for value in item.outputs:
                self.values.pop(value, None)
                found.pop(value, None)
        return [found.get(v) if v in inputs else None for v in self.graph.inputs]


class _Call:
    """A node that calls one region with many operations (`_is_large_call`)."""

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
        for k, ct in enumerate(given):
            if ct is not None:
                statistic = of_cotangent(self.measured.detail)(ct)
                self.measured.stats["ct", self.here, k] = np.asarray(statistic)
        return self.level.backward(given, wanted)


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
        return list(self._take(self.programs.backward(args, kept, given, wanted)))

    def _take(self, answer: _Answer) -> Any:
        """Returns the result of a program, and notes what it has measured, under the nodes of this
        run (the program may have been traced from an equal run)."""
        result, stats, refused, lines = answer
        place = _Places(self.programs.graph.nodes, self.nodes, self.path)
        for (kind, here, k), stat in stats.items():
            self.measured.stats[kind, here and place.of(here), k] = stat
        for here, words in refused.items():
            self.measured.refused.setdefault(place.of(here), words)
        self.measured.lines.update((place.of(here), line) for here, line in lines.items())
        return result


class _Places:
    """Maps a node of one run to the corresponding node of an equal run."""

    def __init__(self, nodes: Sequence[Node], others: Sequence[Node], path: Path):
        self._path = path
        self._nodes, self._others = nodes, others
        self._known: dict[Any, Any] = {}

    def of(self, here: Occurrence) -> Occurrence:
        nodes, others = self._nodes, self._others
        path = list(self._path)
        for node, name in here.path:
            other = self._one(nodes, others, node)
            path.append((other, name))
            nodes, others = node.region(name).nodes, other.region(name).nodes
        return Occurrence(tuple(path), self._one(nodes, others, here.node))

    def _one(self, nodes: Sequence[Node], others: Sequence[Node], node: Node) -> Any:
        if nodes is others:
            return node
        if (node, id(others)) not in self._known:
            pairs = zip(nodes, others, strict=True)
            self._known.update(((a, id(others)), b) for a, b in pairs)
        return self._known[node, id(others)]


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
        # For each program: the tree of its results, the index of each leaf, the refused nodes.
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
        self, args: Sequence[Any], kept: Any, given: Sequence[Any], wanted: tuple[bool, ...]
    ) -> _Answer:
        """Returns the cotangents of the wanted inputs. If `kept` is None, it computes the values
        that the reverse pass needs again: XLA then fuses them into that pass."""

        def run(args: Sequence[Any], kept: Any, given: Sequence[Any]) -> Any:
            if kept is None:
                with self._pass.mute():
                    _, kept = self._pass.forward(self.graph, args, ())
            return self._pass.backward(self.graph, kept, given, wanted, ())

        key = wanted, tuple(ct is not None for ct in given)
        return self._run(key, run, list(args), kept, list(given))

    def _run(self, key: Any, run: Callable[..., Any], *args: Any) -> _Answer:
        """Runs a pass, compiled unless the run is eager, and computes its statistics."""
        measured = self._pass

        def observed(*args: Any) -> Any:
            measured.refused.clear()
            measured.lines.clear()
            with measured.collecting(defer=not self._is_eager) as found:
                return run(*args), found

        def packed(*args: Any) -> list[Any]:
            leaves, form = jax.tree.flatten(observed(*args))
            once = {id(leaf): leaf for leaf in leaves}
            places = {name: k for k, name in enumerate(once)}
            which = [places[id(leaf)] for leaf in leaves]
            self._layouts[key] = form, which, dict(measured.refused)
            return list(once.values())

        with self._one_at_a_time:
            if self._is_eager:
                result, found = observed(*args)
                refused, lines = dict(measured.refused), dict(measured.lines)
            else:
                if key not in self._jitted:
                    options = _jax.quick_options(jax.default_backend())
                    self._jitted[key] = jax.jit(packed, compiler_options=options)
                leaves = self._jitted[key](*args)
                form, which, refused = self._layouts[key]
                result, found = jax.tree.unflatten(form, [leaves[k] for k in which])
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


def key_of(graph: Graph) -> Any:
    """Returns a key that is equal for programs with equal operations and equal derivatives.

    JAX makes new functions for a custom rule whenever it traces a call, so that the functions are
    never equal. The key has the programs that the rules trace to.
    """
    nodes = (o.node for o in graph.walk() if isinstance(o.node, CustomGradient))
    return program_key(graph.program), tuple(map(_rule_key, dict.fromkeys(nodes)))


def _rule_key(node: CustomGradient) -> Any:
    if is_jaxs_rule(node):
        return node.primal.function_source
    try:
        return rule_key(node, is_of_operation=keeps_zeros(node))
    except Exception:  # the rule cannot be traced by itself: it equals no other one
        return object()


# --------------------------------------------------------------------------------------- operations


def _is_large_call(node: Node) -> bool:
    return is_called(node) and is_entered(node) and _count(node, LIMIT) > LIMIT


def _count(node: Node, most: int) -> int:
    """Counts the operations inside a node and the node itself, until there are more than `most`."""
    count, waiting = 0, [node]
    while waiting and count <= most:
        count += 1
        waiting += [n for region in waiting.pop().regions.values() for n in region.nodes]
    return count


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
