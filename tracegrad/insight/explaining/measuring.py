"""A forward and a reverse pass over a graph that return a few numbers about all that flows in them.

The reverse pass is `pull_back`, through every region: jitted functions and recomputed regions are
entered, a scan is pulled back step by step, of a branch the one that was taken. All of it is one
compiled program, and what leaves the device is small: of a cotangent its norm and its zeros. The
*close* form is for when something is not finite: it has the values, too, and the operands where a
NaN or Inf first stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tracegrad import _jax
from tracegrad._jax.caches import of_program
from tracegrad.differentiation.pull_back import node_vjp, pull_back, reached_from
from tracegrad.insight.explaining.authors import may_change
from tracegrad.insight.explaining.statistics import difference, edge, exact, norms, units
from tracegrad.ir import (
    CustomGradient,
    Graph,
    Literal,
    Node,
    Occurrence,
    Recompute,
    StopGradient,
    Value,
)
from tracegrad.ir.dependence import is_reference
from tracegrad.ir.occurrence import (
    Origin,
    line_of_error,
)
from tracegrad.lowering import evaluate_node

# Where a node stands, by numbers, so that it means the same in a graph that was traced anew: the
# regions that lead to it, each by its node's number and its own name.
Steps = tuple[tuple[int, str], ...]
# What a statistic is of: the kind, the way to the graph, the node's number, and the number of its
# result or operand.
Key = tuple[str, Steps, int, int]

# One program on the operands as they are: it is entered.
_ENTERED = frozenset({"jit", "closed_call", "core_call"})


@dataclass
class Kept:
    """What the forward pass over a graph leaves for the reverse pass."""

    values: dict[Value, Any] = field(default_factory=dict)
    inner: dict[Node, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Visit:
    """A node that the reverse pass is at.

    `at` and `number` say where, `given` are the cotangents of its results (None: zero by
    structure), `active` the operands whose cotangents are wanted.
    """

    node: Node
    at: Steps
    number: int
    kept: Kept
    given: Sequence[Any]
    active: Sequence[int]

    @property
    def operands(self) -> list[Any]:
        return [_read(value, self.kept.values) for value in self.node.inputs]

    @property
    def wanted(self) -> list[bool]:
        """For each operand whether its cotangent is."""
        return [i in self.active for i in range(len(self.node.inputs))]

    @property
    def inner(self) -> Any:
        """What the forward pass left of its regions."""
        return self.kept.inner[self.node]

    def inside(self, name: str) -> Steps:
        """The way to one of its regions."""
        return (*self.at, (self.number, name))


class MeasuredPass:
    """The instrumented passes over one graph.

    Args:
      graph: a traced function.
      sources: which of its inputs get cotangents.
      close: whether to look at values, and at the results of every VJP.

    `keys` lists what the statistics are of, in the order in which they were met; `refused` the
    nodes that JAX cannot differentiate, with its words; `lines`, of the rules whose backward makes
    a NaN or Inf, the line there.
    """

    def __init__(self, graph: Graph, sources: Sequence[bool], close: bool):
        self.graph = graph
        self.sources = list(sources)
        self.close = close
        self.keys: list[Key] = []
        self.refused: dict[tuple[Steps, int], str] = {}
        self.lines: dict[tuple[Steps, int], Origin] = {}
        self._numbers: dict[Key, int] = {}
        self._found: dict[int, Any] = {}
        self._muted = False

    def run(self, args: Sequence[Any], seeds: Sequence[Any]) -> dict[int, Any]:
        """The statistics by the number of their key.

        Args:
          args: the graph's inputs.
          seeds: for each output its cotangent, or None.
        """
        with self._collecting() as found:
            outs, kept = self.forward(self.graph, args, ())
            cotangents = self.backward(self.graph, kept, seeds, self.sources, ())
            for i, (arg, ct) in enumerate(zip(args, cotangents, strict=True)):
                if ct is not None:
                    self._note("source", (), 0, i, exact, ct)
                if self.close and _jax.has_gradient(jax.typeof(arg)):
                    self._note("input", (), 0, i, exact, arg)
            for i, out in enumerate(outs):
                if _jax.has_gradient(jax.typeof(out)):
                    self._note("output", (), 0, i, exact, out)
        return found

    # ------------------------------------------------------------------------------- collecting

    @contextmanager
    def _collecting(self) -> Iterator[dict[int, Any]]:
        outer, self._found = self._found, {}
        try:
            yield self._found
        finally:
            self._found = outer

    @contextmanager
    def _mute(self) -> Iterator[None]:
        """A computation that is done once more for the reverse pass is not measured again."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    def _note(
        self, kind: str, at: Steps, number: int, k: int, measure: Callable[..., Any], *args: Any
    ) -> None:
        if not self._muted:
            key = kind, at, number, k
            if key not in self._numbers:
                self._numbers[key] = len(self.keys)
                self.keys.append(key)
            self._found[self._numbers[key]] = measure(*args)

    # ---------------------------------------------------------------------------------- forward

    def forward(self, graph: Graph, args: Sequence[Any], at: Steps) -> tuple[list[Any], Kept]:
        """Runs a graph node by node, through its regions."""
        kept = Kept(dict(graph.constants))
        kept.values.update(zip(graph.inputs, args, strict=True))
        for number, node in enumerate(graph.nodes):
            if self._muted and node.effects and not node.outputs:
                continue  # its effect has happened
            operands = [_read(v, kept.values) for v in node.inputs]
            results = self._forward_node(node, operands, kept, at, number)
            kept.values.update(zip(node.outputs, results, strict=True))
            if self.close and not is_entered(node):
                for k, result in enumerate(results):
                    if _jax.has_gradient(jax.typeof(result)):
                        self._note("value", at, number, k, exact, result)
            if _may_be_rectifier(node):
                maximum = [] if isinstance(node, CustomGradient) else operands
                bounds = _bounds(node, maximum)
                self._note("units", at, number, 0, units, results[0], maximum, bounds)
        return [_read(v, kept.values) for v in graph.outputs], kept

    def _forward_node(
        self, node: Node, args: list[Any], kept: Kept, at: Steps, number: int
    ) -> list[Any]:
        if not is_entered(node):
            return evaluate_node(node, args)
        if node.primitive is _jax.SCAN:
            results, carries = self._forward_scan(node, args, at, number)
            kept.inner[node] = args, carries
            return results
        if node.primitive is _jax.COND:
            kept.inner[node] = args
            return self._forward_cond(node, args, at, number)
        (name,) = node.regions
        results, inside = self.forward(node.regions[name], args, (*at, (number, name)))
        kept.inner[node] = args if isinstance(node, Recompute) else inside
        return results

    def _forward_scan(
        self, node: Node, args: list[Any], at: Steps, number: int
    ) -> tuple[list[Any], list[Any]]:
        first, count = _jax.scan_split(node.params)
        constants, init, scanned = args[:first], args[first : first + count], args[first + count :]

        def step(carry: list[Any], x: list[Any]) -> Any:
            with self._collecting() as found:
                operands = [*constants, *carry, *x]
                outs, _ = self.forward(node.regions["jaxpr"], operands, (*at, (number, "jaxpr")))
            outs = list(map(_strong, outs))
            return outs[:count], (outs[count:], carry, found)

        final, (stacked, carries, found) = _scan(node, step, list(map(_strong, init)), scanned)
        self._found.update(found)
        return [*final, *stacked], carries

    def _forward_cond(self, node: Node, args: list[Any], at: Steps, number: int) -> list[Any]:
        self._note("branch", at, number, 0, lambda: args[0].astype(jnp.float32).reshape(1))

        def branch(name: str) -> Callable[..., Any]:
            def run(*operands: Any) -> Any:
                with self._collecting() as found:
                    outs, _ = self.forward(node.regions[name], operands, (*at, (number, name)))
                return list(map(_strong, outs)), found

            return run

        return self._switch(args[0], [branch(name) for name in node.regions], args[1:])

    def _switch(self, index: Any, branches: Sequence[Any], operands: Any) -> list[Any]:
        """Runs a branch; what is measured in the others is NaN: they did not run."""
        shapes: dict[int, Any] = {}
        for branch in branches:
            shapes.update(jax.eval_shape(branch, *operands)[1])

        def padded(branch: Callable[..., Any]) -> Callable[..., Any]:
            def run(*operands: Any) -> Any:
                outs, found = branch(*operands)
                missing = {
                    key: jnp.full(shape.shape, jnp.nan, shape.dtype)
                    for key, shape in shapes.items()
                    if key not in found
                }
                return outs, {**missing, **found}

            return run

        outs, found = lax.switch(index, [padded(branch) for branch in branches], *operands)
        self._found.update(found)
        return list(outs)

    # --------------------------------------------------------------------------------- backward

    def backward(
        self,
        graph: Graph,
        kept: Kept,
        cotangents: Sequence[Any],
        wanted: Sequence[bool],
        at: Steps,
    ) -> list[Any]:
        """The cotangents of the wanted inputs of a graph; None for those that get none."""
        seeds: dict[Value, list[Any]] = {}
        for value, ct in zip(graph.outputs, cotangents, strict=True):
            if ct is not None and isinstance(value, Value) and _jax.has_gradient(value.aval):
                seeds.setdefault(value, []).append(ct)
        numbers = {node: i for i, node in enumerate(graph.nodes)}

        def through(
            node: Node, values: Mapping[Value, Any], given: Sequence[Any], active: Sequence[int]
        ) -> list[Any]:
            number = numbers[node]
            for k, ct in enumerate(given):
                if ct is not None:
                    self._note("ct", at, number, k, exact if self.close else norms, ct)
            visit = Visit(node, at, number, kept, given, active)
            results = self._backward_node(visit)
            if self.close and not is_entered(node):
                operands = visit.operands
                for i, ct in zip(active, results, strict=True):
                    if ct is not None:
                        self._note("edge", at, number, i, edge, ct, _first(given), operands)
            return results

        inputs = [v for v, chosen in zip(graph.inputs, wanted, strict=True) if chosen]
        found = dict(
            zip(inputs, pull_back(graph, kept.values, seeds, inputs, through=through), strict=True)
        )
        return [found.get(value) for value in graph.inputs]

    def _backward_node(self, visit: Visit) -> list[Any]:
        node, given, active = visit.node, visit.given, visit.active
        if isinstance(node, StopGradient):
            return [None] * len(active)
        if not is_entered(node):
            return self._backward_operation(visit)
        if node.primitive is _jax.SCAN:
            results = self._backward_scan(visit)
            return [results[i] for i in active]
        if node.primitive is _jax.COND:
            return self._backward_cond(visit)
        (name,) = node.regions
        region, inside = node.regions[name], visit.inner
        if isinstance(node, Recompute):
            barrier: Callable[[Any], Any] = lax.optimization_barrier
            args, given = barrier((inside, list(given)))
            with self._mute():
                _, inside = self.forward(region, args, visit.inside(name))
        found = self.backward(region, inside, given, visit.wanted, visit.inside(name))
        return [found[i] for i in active]

    def _backward_operation(self, visit: Visit) -> list[Any]:
        node = visit.node
        try:
            results = node_vjp(node, visit.kept.values, visit.given, visit.active)
        except Exception as error:
            self.refused.setdefault((visit.at, visit.number), str(error).split("\n")[0])
            return [None] * len(visit.active)
        if isinstance(node, CustomGradient) and not self._muted and may_change(node):
            self._compare_with_primal(visit, results)
            if self.close:
                self._look_into_rule(visit)
        return results

    def _backward_scan(self, visit: Visit) -> dict[int, Any]:
        node, given, active = visit.node, visit.given, visit.active
        args, carries = visit.inner
        region, inside = node.regions["jaxpr"], visit.inside("jaxpr")
        first, count = _jax.scan_split(node.params)
        last = first + count
        wanted = _perturbed(node, active, first, count)
        carried = [j for j in range(count) if wanted[first + j]]
        constants = [i for i in range(first) if wanted[i]]
        scanned = [i for i in range(last, len(args)) if wanted[i]]
        zeros = {i: jnp.zeros(args[i].shape, args[i].dtype) for i in (*constants, *active)}
        final = [given[j] if given[j] is not None else _zeros(node.outputs[j]) for j in carried]

        def step(state: Any, item: Any) -> Any:
            (flowing, sums), (x, carry, ct_y) = state, item
            operands = [*args[:first], *carry, *x]
            with self._mute():
                _, values = self.forward(region, operands, inside)
            with self._collecting() as found:
                for j, ct in zip(carried, flowing, strict=True):
                    self._note("carry", visit.at, visit.number, j, norms, ct)
                outs: list[Any] = [None] * count
                for j, ct in zip(carried, flowing, strict=True):
                    outs[j] = ct
                ins = self.backward(region, values, [*outs, *ct_y], wanted, inside)
            flowing = [_or_zeros(ins[first + j], operands[first + j]) for j in carried]
            sums = [
                s if ins[i] is None else s + ins[i] for s, i in zip(sums, constants, strict=True)
            ]
            return (flowing, sums), ([_or_zeros(ins[i], operands[i]) for i in scanned], found)

        init = (list(map(_strong, final)), [_strong(zeros[i]) for i in constants])
        (flowing, sums), (stacked, found) = _scan(
            node, step, init, (args[last:], carries, list(given[count:])), backward=True
        )
        self._found.update(found)
        return {
            **dict(zip(constants, sums, strict=True)),
            **{first + j: ct for j, ct in zip(carried, flowing, strict=True)},
            **dict(zip(scanned, stacked, strict=True)),
        }

    def _backward_cond(self, visit: Visit) -> list[Any]:
        node, args = visit.node, visit.inner
        wanted = visit.wanted[1:]

        def branch(name: str) -> Callable[..., Any]:
            region, inside = node.regions[name], visit.inside(name)

            def run(operands: Any, cotangents: Any) -> Any:
                with self._mute():
                    _, kept = self.forward(region, operands, inside)
                with self._collecting() as found:
                    ins = self.backward(region, kept, cotangents, wanted, inside)
                results = [_or_zeros(ins[i - 1], operands[i - 1]) for i in visit.active]
                return list(map(_strong, results)), found

            return run

        branches = [branch(name) for name in node.regions]
        return self._switch(args[0], branches, (args[1:], list(visit.given)))

    # ------------------------------------------------------------------------------ custom rules

    def _compare_with_primal(self, visit: Visit, results: Sequence[Any]) -> None:
        """What a rule gives beside what the derivative of its function would be."""
        assert isinstance(visit.node, CustomGradient)
        primal, operands = visit.node.primal, visit.operands
        refused = dict(self.refused)
        try:
            with self._mute():
                _, inside = self.forward(primal, operands, ())
                own = self.backward(primal, inside, visit.given, visit.wanted, ())
        except Exception:  # it has a rule because it has no derivative
            return
        finally:
            is_refused, self.refused = self.refused != refused, refused
        if is_refused:
            return
        for i, ct in zip(visit.active, results, strict=True):
            pair = _or_zeros(ct, operands[i]), _or_zeros(own[i], operands[i])
            self._note("rule", visit.at, visit.number, i, difference, *pair, _first(visit.given))

    def _look_into_rule(self, visit: Visit) -> None:
        """Measures what a rule computes: of a VJP its backward, of a JVP the transpose."""
        node, operands = visit.node, visit.operands
        assert isinstance(node, CustomGradient)
        flowing = [
            _zeros(v) if ct is None else ct
            for v, ct in zip(node.outputs, visit.given, strict=True)
            if _jax.has_gradient(v.aval)
        ]
        count = len(node.outputs)
        if node.kind == "vjp":
            self._find_line(visit)
            with self._mute():
                outs, _ = self.forward(node.face("forward"), operands, ())
            residuals = outs[count:]
            self.forward(node.face("backward"), [*residuals, *flowing], visit.inside("backward"))
            return
        rule, inside = node.face("jvp"), visit.inside("jvp")
        has_tangent = [_jax.has_gradient(v.aval) for v in node.inputs]
        tangents = [_zeros(v) for v, has in zip(node.inputs, has_tangent, strict=True) if has]
        with self._mute():
            _, values = self.forward(rule, [*operands, *tangents], inside)
        which = [w for w, has in zip(visit.wanted, has_tangent, strict=True) if has]
        wanted = [False] * len(operands) + which
        self.backward(rule, values, [*[None] * count, *flowing], wanted, inside)

    def _find_line(self, visit: Visit) -> None:
        """The line of a rule's backward that makes a NaN or Inf.

        JAX gives all of a backward the line of the forward call, but a Python function that runs
        has its frames: it is run once more, with JAX's own check after every operation.
        """
        arrays = [x for x in (*visit.operands, *visit.given) if x is not None]
        if any(map(_jax.is_tracer, arrays)) or not all(_all_finite(x) for x in arrays):
            return
        try:
            with jax.disable_jit(), jax.debug_nans(True), jax.debug_infs(True):
                node_vjp(visit.node, visit.kept.values, visit.given, visit.active)
        except FloatingPointError as error:
            line = line_of_error(error.__traceback__)
            if line is not None:
                self.lines[visit.at, visit.number] = line
        except Exception:  # what runs compiled alone has no line, and needs none
            return


# ------------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class CompiledPass:
    """A compiled pass: `call` takes the inputs of the graph and the seeds that are there."""

    measured: MeasuredPass
    call: Callable[..., Any]


def compile_pass(
    graph: Graph, sources: Sequence[bool], seeded: Sequence[bool], close: bool
) -> CompiledPass:
    """One compiled program for the passes.

    `seeded`: which outputs have a cotangent. Statistics of one shape leave it as one array: there
    are some thousand, and each array costs more than the numbers in it.
    """
    measured = MeasuredPass(graph, sources, close)

    def place(seeds: Sequence[Any]) -> list[Any]:
        given = iter(seeds)
        return [next(given) if is_seeded else None for is_seeded in seeded]

    if close:
        # Operation by operation: as one program it would be the largest of all, for a single run.
        def look(args: Sequence[Any], seeds: Sequence[Any]) -> dict[Key, np.ndarray[Any, Any]]:
            measured.lines.clear()
            found = measured.run(args, place(seeds))
            numbers = jax.device_get(found)
            return {measured.keys[key]: stat for key, stat in numbers.items()}

        return CompiledPass(measured, look)

    order: list[list[int]] = []  # of each stack the keys, noted when it is traced

    @jax.jit
    def call(args: Sequence[Any], seeds: Sequence[Any]) -> Any:
        found = measured.run(args, place(seeds))
        groups: dict[tuple[int, ...], list[int]] = {}
        for key, stat in found.items():
            groups.setdefault(stat.shape, []).append(key)
        order.clear()
        order.extend(groups.values())
        return [jnp.stack([found[key] for key in keys]) for keys in groups.values()]

    def run(args: Sequence[Any], seeds: Sequence[Any]) -> dict[Key, np.ndarray[Any, Any]]:
        stacks = call(args, seeds)
        found: dict[Key, np.ndarray[Any, Any]] = {}
        for keys, stack in zip(order, jax.device_get(stacks), strict=True):
            for key, stat in zip(keys, stack, strict=True):
                found[measured.keys[key]] = stat
        return found

    return CompiledPass(measured, run)


# -------------------------------------------------------------------------------------- details


def is_entered(node: Node) -> bool:
    """Whether the passes go through the regions of a node rather than take it as one operation."""
    if not (
        isinstance(node, Recompute)
        or node.op in _ENTERED
        or node.primitive is _jax.SCAN
        or node.primitive is _jax.COND
    ):
        return False
    # What is written to a Ref may be read anywhere; JAX differentiates the region as a whole.
    values = (*node.inputs, *node.outputs)
    return not (
        any(is_reference(v.aval) for v in values)
        or any(map(_has_references, node.regions.values()))
    )


@of_program
def _has_references(graph: Graph) -> bool:
    return any(
        any(is_reference(v.aval) for v in node.outputs)
        or any(map(_has_references, node.regions.values()))
        for node in graph.nodes
    )


def _perturbed(node: Node, active: Sequence[int], first: int, count: int) -> list[bool]:
    """Which inputs of a scan's body have cotangents, once it has run round."""
    region = node.regions["jaxpr"]
    wanted = [i in active for i in range(len(region.inputs))]
    while True:
        chosen = [v for v, is_wanted in zip(region.inputs, wanted, strict=True) if is_wanted]
        reached = reached_from(region, chosen, frozenset())
        more = list(wanted)
        for j in range(count):
            flows = region.outputs[j] in reached and _jax.has_gradient(
                region.inputs[first + j].aval
            )
            more[first + j] = more[first + j] or flows
        if more == wanted:
            return wanted
        wanted = more


def _scan(node: Node, step: Any, init: Any, scanned: Any, backward: bool = False) -> Any:
    return lax.scan(
        step,
        init,
        scanned,
        length=node.params["length"],
        reverse=bool(node.params["reverse"]) != backward,
    )


def _read(value: Value | Literal, values: Mapping[Value, Any]) -> Any:
    return value.value if isinstance(value, Literal) else values[value]


def _all_finite(x: Any) -> bool:
    is_number = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return not is_number or bool(jnp.all(jnp.isfinite(x)))


def _strong(x: Any) -> Any:
    """Without a weak type, so that what goes round in a loop has one type."""
    aval = jax.typeof(x)
    if not isinstance(aval, jax.core.ShapedArray) or jnp.issubdtype(
        aval.dtype, jax.dtypes.extended
    ):
        return x
    return lax.convert_element_type(x, aval.dtype)


def _zeros(value: Any) -> Any:
    return jnp.zeros(value.aval.shape, value.aval.dtype)


def _or_zeros(ct: Any, like: Any) -> Any:
    return jnp.zeros(jnp.shape(like), jnp.result_type(like)) if ct is None else ct


def _first(given: Sequence[Any]) -> Any:
    return next(ct for ct in given if ct is not None)


def _may_be_rectifier(node: Node) -> bool:
    shape = getattr(node.outputs[0].aval, "shape", ()) if node.outputs else ()
    if len(shape) < 2 or math.prod(shape) == 0 or not _jax.has_gradient(node.outputs[0].aval):
        return False
    return node.op == "max" or (isinstance(node, CustomGradient) and node.name == "relu")


def _bounds(node: Node, operands: Sequence[Any]) -> Sequence[Any]:
    """What a maximum may be with: where a number is written there, that."""
    pairs = zip(node.inputs, operands, strict=False)
    return [x for value, x in pairs if _is_written(value)] or operands


def _is_written(value: Value | Literal) -> bool:
    """Whether a value is a number in the program, or an array filled with one."""
    if isinstance(value, Literal):
        return True
    node = value.producer
    return node is not None and node.op == "broadcast_in_dim" and _is_written(node.inputs[0])


def occurrence(graph: Graph, at: Steps, number: int) -> Occurrence:
    """The node that a key means, in a graph traced from the same program."""
    path = []
    for step, name in at:
        node = graph.nodes[step]
        path.append((node, name))
        graph = node.region(name)
    return Occurrence(tuple(path), graph.nodes[number])
