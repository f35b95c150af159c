"""A forward and a reverse pass over a graph that return statistics of the values and cotangents.

The reverse pass is `pull_back` through every region: it enters jitted functions and recomputed
regions, pulls a scan back step by step, and a cond along the branch taken. A `Detail` says how much
the passes measure.

Rules and taps inserted in the program could not measure this. JAX differentiates all or nothing: it
neither tells zeros from no gradient, nor continues past an operation that it cannot differentiate.
For each step of a scan it would keep all residuals; this pass keeps only the carries and recomputes
the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.differentiation.pull_back import node_vjp, pull_back, reached_from
from tracegrad.insight.explaining.collecting import Collector
from tracegrad.insight.explaining.custom_rules import (
    compare_with_primal,
    look_into_rule,
    of_right_dtypes,
    refuse_closed_over,
)
from tracegrad.insight.explaining.detail import Detail, telling
from tracegrad.insight.explaining.padding import scale_of_normalisation
from tracegrad.insight.explaining.statistics import (
    amplified,
    edge,
    exact,
    index,
    shown_by_edge,
)
from tracegrad.insight.explaining.visits import (
    Kept,
    Visit,
    first_of,
    is_called,
    is_entered,
    is_in_scan,
    or_zeros,
    strong,
)
from tracegrad.ir import (
    CustomGradient,
    Graph,
    Node,
    Occurrence,
    Recompute,
    Value,
    has_gradient,
)
from tracegrad.ir.authors import may_change
from tracegrad.ir.occurrence import Path
from tracegrad.ir.running import read, run_node, run_nodes
from tracegrad.ir.wording import first_line
from tracegrad.rewriting.kept_zeros import keeps_zeros
from tracegrad.tracing.rule_errors import CLOSES_OVER


class MeasuredPass(Collector):
    """The measuring passes over one graph.

    Args:
      graph: a traced function.
      detail: how much is measured, `Detail.FEW` or `Detail.ALL`.

    Attributes:
      refused: the nodes that JAX cannot differentiate, each with JAX's message.
    """

    def __init__(self, graph: Graph, detail: Detail):
        super().__init__()
        self.graph = graph
        self.detail = detail
        self.walk = Walk()
        self.refused: dict[Occurrence, str] = {}
        self.leaking: dict[Occurrence, str] = {}  # refused rules, found when their program failed

    # ---------------------------------------------------------------------------------- forward

    def forward(self, graph: Graph, args: Sequence[Any], path: Path) -> tuple[list[Any], Kept]:
        """Runs a graph node by node, through its regions; returns its outputs, and the values that
        the reverse pass needs."""
        inner: dict[Node, Any] = {}

        def run(node: Node, operands: list[Any]) -> list[Any]:
            here = Occurrence(path, node)
            if self.is_muted and node.effects and not node.outputs:
                return []  # its effect has already happened
            if is_entered(node):
                return self._enter(here, inner, operands)
            if self.detail is Detail.ALL:
                return self._run_and_measure(here, operands)
            return run_node(node, operands)

        values = run_nodes(graph, args, run)
        return read(graph.outputs, values), Kept(values, inner)

    def _run_and_measure(self, here: Occurrence, operands: list[Any]) -> list[Any]:
        """Runs and measures a node that is not entered; returns its results."""
        results = run_node(here.node, operands)
        for k, array in enumerate(results):
            if _jax.is_inexact(jax.typeof(array).dtype):
                self.note("value", here, k, exact, array)
        return results

    def _enter(self, here: Occurrence, inner: dict[Node, Any], args: list[Any]) -> list[Any]:
        """Runs a node through its regions; returns its results. Puts into `inner` what the reverse
        pass needs of the regions: for most nodes the operands."""
        node = here.node
        inner[node] = args
        if node.primitive is _jax.SCAN:
            results, carries = self._forward_scan(here, args)
            inner[node] = args, carries
        elif node.primitive is _jax.COND:
            results = self._forward_cond(here, args)
        else:
            (name,) = node.regions
            results, kept = self.forward(node.regions[name], args, here.into(name))
            if not isinstance(node, Recompute):
                inner[node] = kept
        return results

    def _forward_scan(self, here: Occurrence, args: list[Any]) -> tuple[list[Any], Any]:
        node = here.node
        first, count = _jax.scan_split(node.params)
        constants, init, scanned = args[:first], args[first : first + count], args[first + count :]

        def step(carry: list[Any], x: list[Any]) -> Any:
            operands = [*constants, *carry, *x]
            outs, _ = self.forward(node.regions["jaxpr"], operands, here.into("jaxpr"))
            outs = list(map(strong, outs))
            return outs[:count], (outs[count:], carry)

        length, is_reverse = node.params["length"], bool(node.params["reverse"])
        start = list(map(strong, init))
        final, (stacked, carries) = self.scan(step, start, scanned, length, is_reverse)
        return [*final, *stacked], carries

    def _forward_cond(self, here: Occurrence, args: list[Any]) -> list[Any]:
        self.note("branch", here, 0, index, args[0])

        def branch(name: str) -> Callable[..., Any]:
            def run(*operands: Any) -> Any:
                with self.collecting() as found:
                    outs, _ = self.forward(here.node.regions[name], operands, here.into(name))
                return list(map(strong, outs)), found

            return run

        return self._switch(args[0], [branch(name) for name in here.node.regions], args[1:])

    def _switch(self, index: Any, branches: Sequence[Any], operands: Any) -> list[Any]:
        """Runs a branch; statistics of the other branches are NaN, or 0 if the dtype has no NaN."""
        # Trace each branch once. Tracing it here and again in `lax.switch` would double the traces
        # at each level of nested branches.
        traced = [jax.make_jaxpr(branch, return_shape=True)(*operands) for branch in branches]
        shapes = {key: shape for _, (_, found) in traced for key, shape in found.items()}

        def padded(program: Any, results: Any) -> Callable[..., Any]:
            def run(*operands: Any) -> Any:
                flat = _jax.eval_program(program, jax.tree.leaves(operands))
                outs, found = jax.tree.unflatten(jax.tree.structure(results), flat)
                missing = {
                    key: jnp.full(
                        shape.shape, jnp.nan if _jax.is_inexact(shape.dtype) else 0, shape.dtype
                    )
                    for key, shape in shapes.items()
                    if key not in found
                }
                return outs, {**missing, **found}

            return run

        outs, found = lax.switch(index, [padded(*branch) for branch in traced], *operands)
        self.add(found)
        return list(outs)

    # --------------------------------------------------------------------------------- backward

    def backward(
        self,
        graph: Graph,
        kept: Kept,
        cotangents: Sequence[Any],
        wanted: Sequence[bool],
        path: Path,
    ) -> list[Any]:
        """Returns the cotangents of the wanted inputs of a graph; None for inputs without one."""
        is_few = self.detail is Detail.FEW and not is_in_scan(path)
        told = frozenset(itertools.compress(graph.nodes, telling(graph)) if is_few else graph.nodes)
        seeds: dict[Value, list[Any]] = {}
        for value, ct in zip(graph.outputs, cotangents, strict=True):
            if ct is not None and isinstance(value, Value) and has_gradient(value):
                seeds.setdefault(value, []).append(ct)

        def through(node: Node, given: Sequence[Any], active: Sequence[int]) -> list[Any]:
            visit = Visit(Occurrence(path, node), kept, given, active)
            for k, ct in enumerate(given if node in told else ()):
                if ct is not None:
                    self.note("ct", visit.here, k, exact, ct)
            if node not in kept.inner:
                return self._pull_back(visit)
            results = self._backward_region(visit)
            if not is_called(node):
                self._note_edges(visit, results)
            return results

        inputs = [v for v, chosen in zip(graph.inputs, wanted, strict=True) if chosen]
        reached = reached_from(graph, inputs, self.walk)
        refuse_closed_over(self.refused, graph, reached, path)
        results = pull_back(graph, seeds, inputs, reached, through)
        found = dict(zip(inputs, results, strict=True))
        return [found.get(value) for value in graph.inputs]

    def _pull_back(self, visit: Visit) -> list[Any]:
        """Applies and measures the VJP of a node that is one operation; None for a cotangent that
        JAX refuses to compute."""
        node = visit.here.node
        # A rule that closes over values of another trace cannot run here.
        if self.refused.get(visit.here, "").endswith(CLOSES_OVER):
            return [None] * len(visit.active)
        try:
            results = node_vjp(self.walk, node, visit.kept.values, visit.given, visit.active)
        except Exception as error:
            self.refused.setdefault(visit.here, first_line(error))
            return [None] * len(visit.active)
        if isinstance(node, CustomGradient):
            results = of_right_dtypes(self, visit, results)
        is_rule = isinstance(node, CustomGradient) and may_change(node) and not keeps_zeros(node)
        if is_rule and not self.is_muted:
            compare_with_primal(self, visit, results)
            if self.detail is Detail.ALL:
                look_into_rule(self, visit)
        region = self.graph.region_of(visit.here)
        scale = None if self.is_muted else scale_of_normalisation(region, node)
        for i, ct in zip(visit.active, results, strict=True):
            if scale is not None and i != scale and ct is not None:
                factor = visit.operands[scale] if node.op == "mul" else 1 / visit.operands[scale]
                self.note("amplified", visit.here, i, amplified, ct, factor)
        self._note_edges(visit, results)
        return results

    def _note_edges(self, visit: Visit, results: Sequence[Any]) -> None:
        """Measures the cotangent that the VJP of a node gives to each operand."""
        if self.detail is not Detail.ALL:
            return
        operands = visit.operands
        for i, ct in zip(visit.active, results, strict=True):
            if ct is not None:
                given = first_of(visit.given)
                shown = shown_by_edge(ct, given, operands)
                self.note("edge", visit.here, i, edge, ct, given, shown)

    def _backward_region(self, visit: Visit) -> list[Any]:
        node, given, inside = visit.here.node, visit.given, visit.inner
        if node.primitive is _jax.SCAN:
            return self._backward_scan(visit)
        if node.primitive is _jax.COND:
            return self._backward_cond(visit)
        (name,) = node.regions
        region, path = node.regions[name], visit.here.into(name)
        if isinstance(node, Recompute):
            barrier: Callable[[Any], Any] = lax.optimization_barrier
            args, given = barrier((inside, list(given)))
            with self.mute():
                _, inside = self.forward(region, args, path)
        found = self.backward(region, inside, given, visit.wanted, path)
        return [found[i] for i in visit.active]

    def _backward_scan(self, visit: Visit) -> list[Any]:
        node, given, active = visit.here.node, visit.given, visit.active
        args, carries = visit.inner
        region, path = node.regions["jaxpr"], visit.here.into("jaxpr")
        first, count = _jax.scan_split(node.params)
        last = first + count
        wanted = self._perturbed(node, active)
        carried = [j for j in range(count) if wanted[first + j]]
        constants = [i for i in range(first) if wanted[i]]
        scanned = [i for i in range(last, len(args)) if wanted[i]]
        final = [or_zeros(given[j], args[first + j]) for j in carried]

        def step(state: Any, item: Any) -> Any:
            (flowing, sums), (x, carry, ct_y) = state, item
            operands = [*args[:first], *carry, *x]
            with self.mute():
                _, values = self.forward(region, operands, path)
            outs: list[Any] = [None] * count
            for j, ct in zip(carried, flowing, strict=True):
                self.note("carry", visit.here, j, exact, ct)
                outs[j] = ct
            ins = self.backward(region, values, [*outs, *ct_y], wanted, path)
            flowing = [or_zeros(ins[first + j], operands[first + j]) for j in carried]
            sums = [
                s if ins[i] is None else s + ins[i] for s, i in zip(sums, constants, strict=True)
            ]
            return (flowing, sums), [or_zeros(ins[i], operands[i]) for i in scanned]

        sums = [or_zeros(None, args[i]) for i in constants]
        start, items = list(map(strong, final)), (args[last:], carries, list(given[count:]))
        length, is_reverse = node.params["length"], not node.params["reverse"]
        (flowing, sums), stacked = self.scan(step, (start, sums), items, length, is_reverse)
        places = [*constants, *(first + j for j in carried), *scanned]
        results = dict(zip(places, [*sums, *flowing, *stacked], strict=True))
        return [results[i] for i in active]

    def _perturbed(self, scan: Node, active: Sequence[int]) -> list[bool]:
        """Returns for each input of a scan's body whether it gets a cotangent at some step."""
        entered = self.walk.enter(scan, [int(i in active) for i in range(len(scan.inputs))])
        assert entered is not None
        return [mask != 0 for mask in entered[1]["jaxpr"]]

    def _backward_cond(self, visit: Visit) -> list[Any]:
        regions, args = visit.here.node.regions, visit.inner
        wanted = visit.wanted[1:]

        def branch(name: str) -> Callable[..., Any]:
            region, path = regions[name], visit.here.into(name)

            def run(operands: Any, cotangents: Any) -> Any:
                with self.mute():
                    _, kept = self.forward(region, operands, path)
                with self.collecting() as found:
                    ins = self.backward(region, kept, cotangents, wanted, path)
                results = [or_zeros(ins[i - 1], operands[i - 1]) for i in visit.active]
                return list(map(strong, results)), found

            return run

        branches = [branch(name) for name in regions]
        return self._switch(args[0], branches, (args[1:], list(visit.given)))
