"""Measures a graph in runs (of neighbouring operations); equal runs share compiled programs.

The forward pass keeps the values that cross between runs. The reverse pass recomputes the values of
one run at a time. The last run is one program: the cotangents of its results are known before it
runs.

Compiling a program that returns everything takes several times as long as compiling the run without
that. With `Detail.ALL` only the reverse pass does it. With `Detail.BAD` a run does it after a pass
that measures few: forward if a result of the run is not finite, backward if the run turns finite
cotangents into others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.differentiation.pull_back import active_inputs, node_vjp, reached_from
from tracegrad.insight.explaining.custom_rules import refuse_closed_over
from tracegrad.insight.explaining.cutting import is_large_call, runs_of
from tracegrad.insight.explaining.detail import Detail
from tracegrad.insight.explaining.observed import Key, Observed, same_place
from tracegrad.insight.explaining.programs import Answer, Programs, programs_of
from tracegrad.insight.explaining.statistics import INF, NAN, exact
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
from tracegrad.ir.occurrence import line_of_error
from tracegrad.rewriting.kept_zeros import keeps_zeros


def measure(
    graph: Graph,
    sources: Sequence[bool],
    inputs: Sequence[Any],
    detail: Detail,
) -> Observed:
    """Measures a graph in a forward pass and in the reverse pass of its first output, a scalar.

    Args:
      graph: a traced function.
      sources: for each input whether it gets a cotangent.
      inputs: the arrays of the inputs.
      detail: how much to measure.
    """
    found = _Measured(detail)
    value, *others = graph.outputs
    # JAX's own checks would raise at the NaN that is to be explained.
    with jax.debug_nans(False), jax.debug_infs(False):
        level = _Level(found, graph)
        level.seed([jnp.ones((), dtype_of(value)), *[None] * len(others)], sources)
        outs = level.forward(inputs)
        found.note_each("output", outs)
        if detail is not Detail.FEW:
            found.note_each("input", inputs)
        if detail is not Detail.BAD:
            found.note_each("source", level.pull())
        elif _are_finite(outs):  # else the gradient says nothing of where the NaN began
            level.pull()
    return Observed(graph, detail, found.stats, found.refused, found.lines)


class _Measured:
    """The statistics measured so far; `detail` as for `measure`. `is_over`: whether a reverse pass
    with `Detail.BAD` has found a run that turns finite cotangents into others: it then stops, and
    leaves the gradients of the sources incomplete."""

    def __init__(self, detail: Detail):
        self.detail = detail
        self.is_over = False
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
    """A graph, measured item by item: the program, or the region of a call with many operations
    (`is_large_call`). An item is a run, or such a call, which is a level of its own.

    `values` holds the values that cross between items, until the reverse pass has used them.
    """

    def __init__(self, measured: _Measured, graph: Graph, call: Occurrence | None = None):
        self.measured = measured
        self.graph = graph
        self.call = call
        self.path = call.into(*call.node.regions) if call else ()
        self.inputs: Sequence[Atom] = call.node.inputs if call else ()
        self.outputs: Sequence[Value] = call.node.outputs if call else ()
        self.items: list[_Level | _Run] = []
        self.values: dict[Value, Any] = {}
        self.cotangents: dict[Value, Any] = {}
        self.wanted: Sequence[Value] = ()
        self.reached: Collection[Value] = ()
        self.last_pulled: list[Any] | None = None
        for kind, group in itertools.groupby(graph.nodes, self._kind_of):
            nodes = tuple(group)
            if kind == "call":
                for node in nodes:
                    (region,) = node.regions.values()
                    self.items.append(_Level(measured, region, Occurrence(self.path, node)))
            elif kind == "rule":
                self.items += [_Run(self, (node,)) for node in nodes]
            else:
                self.items += [_Run(self, tuple(run)) for run in runs_of(nodes, measured.detail)]

    def _kind_of(self, node: Node) -> str:
        """Returns "call" for a large call, "rule" for a node that is a run by itself, so that the
        line of a NaN in its rule can be found, else ""."""
        is_rule = self.measured.detail is not Detail.FEW and _may_have_line(node)
        return "call" if is_large_call(node) else "rule" if is_rule else ""

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

    def seed(self, given: Sequence[Any], wanted: Sequence[bool]) -> None:
        """Takes the cotangents of the outputs, and for which inputs `pull` is asked."""
        for k, ct in enumerate(given):
            if ct is not None and self.call is not None:
                self.measured.stats["ct", self.call, k] = np.asarray(exact(ct))
        self.wanted = [v for v, chosen in zip(self.graph.inputs, wanted, strict=True) if chosen]
        self.reached = reached_from(self.graph, self.wanted, self.measured.walk)
        refuse_closed_over(self.measured.refused, self.graph, self.reached, self.path)
        self._add(self.graph.outputs, given)

    def pull(self) -> list[Any]:
        """Returns the cotangents of the wanted inputs of the graph; None for inputs without one."""
        for item in reversed(self.items):
            if self.measured.is_over:
                break
            if pulled := self._given_and_asked(item):
                terms, self.last_pulled = self.last_pulled, None
                if terms is None:
                    terms = item.backward(_read(item.inputs, self.values), *pulled)
                self._add(item.inputs, terms)
            elif self.measured.detail is Detail.ALL:
                item.note_values(_read(item.inputs, self.values))
            for value in item.outputs:
                self.values.pop(value, None)
                self.cotangents.pop(value, None)
        return [self.cotangents.get(v) if v in self.wanted else None for v in self.graph.inputs]

    def backward(
        self, args: Sequence[Any], given: Sequence[Any], wanted: Sequence[bool]
    ) -> list[Any]:
        self.seed(given, wanted)
        return self.pull()

    def forward_and_backward(
        self, args: Sequence[Any], given: Sequence[Any], wanted: Sequence[bool]
    ) -> tuple[list[Any], list[Any]]:
        self.seed(given, wanted)
        return self.forward(args), self.pull()

    def note_values(self, args: Sequence[Any]) -> None:
        for item in self.items:
            item.note_values(_read(item.inputs, self.values))

    def _add(self, values: Sequence[Atom], terms: Sequence[Any]) -> None:
        known = self.cotangents
        for value, term in zip(values, terms, strict=True):
            if term is not None and isinstance(value, Value) and has_gradient(value):
                known[value] = _sum(known[value], term) if value in known else term

    def _given_and_asked(self, item: _Level | _Run) -> tuple[list[Any], tuple[bool, ...]] | None:
        """Returns the cotangents of an item's outputs, and for each input whether a cotangent is
        wanted; None if there is no such cotangent, or no such input."""
        given = [self.cotangents.get(v) for v in item.outputs]
        asked = tuple(isinstance(v, Value) and v in self.reached for v in item.inputs)
        flows = any(asked) and any(ct is not None for ct in given)
        return (given, asked) if flows else None


class _Run:
    """Neighbouring operations that are compiled together."""

    def __init__(self, level: _Level, nodes: Sequence[Node]):
        made = {v for node in nodes for v in node.outputs}
        users, members = level.graph.users, set(nodes)
        self.nodes, self.path, self.measured = nodes, level.path, level.measured
        self.inputs = list(dict.fromkeys(v for n in nodes for v in n.operands if v not in made))
        # A value that nothing uses is an output, too, so that the run of the last layer equals the
        # runs before it. (Each layer passes on the count of random numbers drawn.)
        self.outputs = [
            v
            for node in nodes
            for v in node.outputs
            if v in level.graph.results or not members.issuperset(users.get(v, [None]))
        ]
        program = _jax.program_of(
            level.graph.program,
            constants={},
            inputs=self.inputs,
            outputs=self.outputs,
            equations=[node.equation for node in nodes],
        )
        name = level.graph.name
        self._graph = Graph(program=program, make_nodes=lambda: tuple(nodes), name=name)
        # Effects must happen once, so that the values of such a run are not recomputed.
        self._is_kept = any(node.effects for node in nodes)
        self._kept: Any = None

    @functools.cached_property
    def _few(self) -> Programs:
        return programs_of(self._graph, Detail.FEW)

    @functools.cached_property
    def _all(self) -> Programs:
        return programs_of(self._graph, Detail.ALL)

    @property
    def _backward(self) -> Programs:
        """The programs that always run in the reverse pass."""
        least = Detail.BAD if self._is_kept else Detail.ALL
        return self._few if self.measured.detail < least else self._all

    def forward(self, args: Sequence[Any]) -> list[Any]:
        programs = self._backward if self._is_kept else self._few
        outs, self._kept = self._take(programs.forward(args, self._is_kept), programs)
        self._look_at_values(args, outs)
        return list(outs)

    def backward(
        self, args: Sequence[Any], given: Sequence[Any], wanted: tuple[bool, ...]
    ) -> list[Any]:
        programs, kept, self._kept = self._backward, self._kept, None
        has_run = self._is_kept or programs is self._few
        answer = programs.backward(args, kept, given, wanted, has_run=has_run)
        _, terms = self._take(answer, programs)
        self._look_at_cotangents(args, given, wanted, terms)
        return list(terms)

    def forward_and_backward(
        self, args: Sequence[Any], given: Sequence[Any], wanted: tuple[bool, ...]
    ) -> tuple[list[Any], list[Any]]:
        programs = self._backward
        if programs.has_run:  # an equal run has compiled the two programs
            return self.forward(args), self.backward(args, given, wanted)
        answer = programs.backward(args, None, given, wanted, has_run=False)
        outs, terms = self._take(answer, programs)
        self._look_at_values(args, outs)
        if _are_finite(out for out, ct in zip(outs, given, strict=True) if ct is not None):
            self._look_at_cotangents(args, given, wanted, terms)
        return list(outs), list(terms)

    def note_values(self, args: Sequence[Any]) -> None:
        """Measures all values, unless the forward pass has."""
        if not self._is_kept:
            self._take(self._all.forward(args, False), self._all)

    def _look_at_values(self, args: Sequence[Any], outs: Sequence[Any]) -> None:
        """With `Detail.BAD`, measures the results, and all values if a result is not finite."""
        if self.measured.detail is not Detail.BAD:
            return
        known = {v: array for v, array in zip(self.outputs, outs, strict=True) if has_gradient(v)}
        for node in self.nodes:
            for k, v in enumerate(node.outputs):
                if v in known:
                    here = Occurrence(self.path, node)
                    self.measured.stats["value", here, k] = np.asarray(exact(known[v]))
        if not _are_finite(known.values()):
            self.note_values(args)

    def _look_at_cotangents(
        self,
        args: Sequence[Any],
        given: Sequence[Any],
        wanted: tuple[bool, ...],
        terms: Sequence[Any],
    ) -> None:
        """If the run turns finite cotangents into others, finds the line in a rule that does so;
        with `Detail.BAD` also measures everything."""
        if self.measured.detail is Detail.FEW or _are_finite(terms) or not _are_finite(given):
            return
        if len(self.nodes) == 1 and _may_have_line(self.nodes[0]) and _are_finite(args):
            self._find_line(args, given, wanted)
        if self.measured.detail is Detail.ALL:
            return
        self.measured.is_over = True
        if not self._is_kept:
            self._take(self._all.backward(args, None, given, wanted, has_run=False), self._all)

    def _find_line(
        self, args: Sequence[Any], given: Sequence[Any], wanted: tuple[bool, ...]
    ) -> None:
        """Notes the line of a rule's backward that makes a NaN or Inf.

        In a trace all operations of a backward have the line of the forward call. So the Python
        function is run once more without jit; JAX's own check after every operation raises at the
        line."""
        (node,), values = self.nodes, dict(zip(self.inputs, args, strict=True))
        active = active_inputs(node, set(itertools.compress(self.inputs, wanted)))
        try:
            with jax.disable_jit(), jax.debug_nans(True), jax.debug_infs(True):
                node_vjp(self.measured.walk, node, values, given, active)
        except FloatingPointError as error:
            if (line := line_of_error(error.__traceback__)) is not None:
                self.measured.lines[Occurrence(self.path, node)] = line
        except Exception:  # the rule runs only compiled, so that there is no line to find
            return

    def _take(self, answer: Answer, programs: Programs) -> Any:
        """Returns the result of a program, and notes what it has measured, under the nodes of this
        run (the program may have been traced from an equal run)."""
        result, stats, refused = answer

        @functools.cache
        def ours(here: Occurrence) -> Occurrence:
            return same_place(here, programs.graph, self._graph, self.path)

        for (kind, here, k), stat in stats.items():
            self.measured.stats[kind, here and ours(here), k] = stat
        for here, words in refused.items():
            self.measured.refused.setdefault(ours(here), words)
        return result


# --------------------------------------------------------------------------------------- operations


def _may_have_line(node: Node) -> bool:
    """Whether a node has a backward function of the user's, which a NaN may begin in."""
    return isinstance(node, CustomGradient) and node.kind == "vjp" and not keeps_zeros(node)


def _read(atoms: Sequence[Atom], values: Mapping[Value, Any]) -> list[Any]:
    return [
        values[atom] if isinstance(atom, Value) else np.asarray(atom.val, dtype_of(atom))
        for atom in atoms
    ]


def _are_finite(arrays: Iterable[Any]) -> bool:
    """Whether no array has a NaN or Inf (None counts as zeros)."""
    known = (x for x in arrays if x is not None and _jax.is_inexact(jax.typeof(x).dtype))
    return not any(np.any(np.asarray(exact(x))[NAN : INF + 1]) for x in known)


def _sum(one: Any, other: Any) -> Any:
    """Adds two arrays, by NumPy if this process has all of both: XLA would compile a program for
    every shape."""
    if all(getattr(x, "is_fully_addressable", True) for x in (one, other)):
        return np.asarray(one) + np.asarray(other)
    return one + other
