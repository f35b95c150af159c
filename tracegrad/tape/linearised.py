"""An operation that saves, as it runs, what its derivative needs.

Under a tape a jitted function, a loop, a branch or a recomputed function runs its forward pass as
JAX differentiates it: the values in the middle on which the derivative depends come out with its
results. So the backward pass does not run it again, which would cost time, since no compiler makes
one loop of two, and would call the host twice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.differentiation.pull_back import node_vjp, sum_of_known
from tracegrad.ir import Graph, Node, Source, Value
from tracegrad.ir.dependence import joined, of_each
from tracegrad.ir.importer import import_program, lone_node
from tracegrad.lowering import evaluate, evaluate_node, read
from tracegrad.rewriting.host_calls import TO_HOST, end_gradients_at_host, end_gradients_in
from tracegrad.rewriting.ports import with_steps
from tracegrad.tape.computations import Computation
from tracegrad.tape.effects import silence, silence_in
from tracegrad.tape.keys import PROGRAMS, RULES, has_rules

# As many derivatives as are taken of one another get what they need from the forward pass; a
# further one runs it again.
_MOST_ORDERS = 3
# For as many choices of results that have cotangents a backward pass is remembered.
_MOST_BACKWARDS = 16


@dataclass(frozen=True)
class _Pass:
    """The backward pass of one order: of the results and of what the orders before it save.

    Attributes:
      count: how many results it has cotangents of.
      residuals: the places, among operands and results, of what it needs of the forward pass.
      backward: for the mask of the float results that have cotangents the program ``(*residuals,
        *their cotangents) -> of the active operands``.
      flows: for each active operand the mask of the float results that it gets a gradient from.
    """

    count: int
    residuals: list[int]
    backward: Callable[[int], Any]
    flows: list[int]


class Linearised(Computation):
    """The forward pass of an operation, with respect to some of its operands.

    Attributes:
      active: the positions of the operands of which derivatives may be wanted.
      forward: the forward pass, ``(*operands) -> (*results, *saved)``, compiled.
      original: the computation of which it is the forward pass.
      count: how many results that has; after them comes what is saved.
    """

    __slots__ = ("_graph", "_has_rules", "_passes", "active", "count", "forward", "original")

    def __init__(
        self,
        of: Computation,
        active: tuple[int, ...],
        types: Sequence[Any],
        orders: int,
        key: Any,
        passes: Sequence[_Pass],
        graph: Graph,
    ):
        """`types`: of all operands; `orders`: as many derivatives of one another were to be given
        without running it again; `key`: which key of `of` tells it from others, that of one
        derivative or of all; `passes`, `graph`: from `_trace_orders`."""
        self.original = of
        self.active = active
        self._has_rules = of.primitive in RULES or has_rules(_jax.facts_below(of.params))
        self._passes = passes
        self._graph = graph
        self.count = passes[0].count

        def forward(*args: Any) -> list[Any]:
            return self.run_forward(*args)

        forward.__name__ = forward.__qualname__ = str(of.params.get("name", of.primitive.name))
        self.forward: Callable[..., list[Any]] = jax.jit(forward)
        with jax.disable_jit(False):
            (equation,) = _jax.opened(jax.make_jaxpr(self.forward)(*types)).eqns
        super().__init__(_jax.JIT, dict(equation.params), is_shared=of.is_shared)
        how = "linearised", active, tuple(types), orders
        self._keys = (*how, key), (*how, of.keys[1])

    @property
    def deciding(self) -> int:
        """Of how many of its first results `pull_back` says to what they are connected. The program
        of the forward pass, in which a rule is but its forward function, does not tell that; to
        what the others are connected, it does."""
        is_whole = self.original.primitive is _jax.REMAT  # see `linked_inputs`
        return len(self._graph.outputs) if is_whole else self.count

    def run_forward(self, *operands: Any) -> list[Any]:
        """The forward pass, operation by operation: ``(*results, *saved)``."""
        return evaluate(self._graph, operands)

    def pull_back(
        self,
        walk: Walk,
        node: Node,
        values: Mapping[Value, Any],
        cotangents: Sequence[Any],
        active: Sequence[int],
        *,
        as_called: bool = False,
    ) -> list[Any]:
        """The cotangents of operands of a node of this computation, as `node_vjp` gives them.

        `as_called`: those of its results without what was saved for them.
        """
        terms = [
            self._of_part(walk, first, node, values, part, active, as_called=as_called)
            for first, part in self._parts(cotangents)
            if any(ct is not None for ct in part)
        ]
        return list(map(sum_of_known, zip(*terms, strict=True)))

    def _parts(self, cotangents: Sequence[Any]) -> list[tuple[int, list[Any]]]:
        """Which order's backward pass takes which of the cotangents; None for the others.

        What an order saves comes from the forward pass of the order before, in which a custom rule
        is just what its forward function does: what was saved is differentiated through that, the
        results through the rule. Without rules one pass takes all.
        """
        ends = [*(one.count for one in self._passes), len(cotangents)]
        if not self._has_rules:
            last = max(i for i, ct in enumerate(cotangents) if ct is not None)
            return [(next(i for i, end in enumerate(ends) if last < end), list(cotangents))]
        return [
            (order, [ct if begin <= i < end else None for i, ct in enumerate(cotangents)])
            for order, (begin, end) in enumerate(itertools.pairwise([0, *ends]))
        ]

    def _of_part(
        self,
        walk: Walk,
        order: int,
        node: Node,
        values: Mapping[Value, Any],
        cotangents: Sequence[Any],
        active: Sequence[int],
        as_called: bool,
    ) -> list[Any]:
        is_saved = order < len(self._passes) and set(active) <= set(self.active)
        if is_saved and not (order == 0 and as_called):
            one = self._passes[order]
            found = dict(zip(self.active, self._pull_back(one, node, values, cotangents)))
            return [found[i] for i in active]
        if order == 0:  # an operand that nobody watched when it ran
            node, values = self.as_called(node, values)
            cotangents = cotangents[: self.count]
        silence(node)  # it runs once more to be differentiated: its effects have happened
        return node_vjp(walk, node, values, cotangents, active)

    def _pull_back(
        self, one: _Pass, node: Node, values: Mapping[Value, Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        every = (*node.inputs, *node.outputs)
        residuals = read([every[place] for place in one.residuals], values)
        results = zip(node.outputs[: one.count], cotangents)
        flowing = [ct for value, ct in results if _jax.has_gradient(value.aval)]
        given = joined(1 << i for i, ct in enumerate(flowing) if ct is not None)
        seeds = [ct for ct in flowing if ct is not None]
        found = _jax.eval_program(one.backward(given), [*residuals, *seeds])
        if self.original.primitive is _jax.REMAT:
            return list(found)  # it counts as a whole: see `node_vjp`
        return [ct if flow & given else None for ct, flow in zip(found, one.flows, strict=True)]

    def as_called(self, node: Node, values: Mapping[Value, Any]) -> tuple[Node, dict[Value, Any]]:
        """The node of the operation itself in the place of its forward pass, with its values."""
        of, source = self.original, node.source
        assert source is not None
        types = [value.aval for value in node.inputs]
        results = [value.aval for value in node.outputs[: self.count]]
        called = lone_node(of.primitive, of.params, types, source, results)
        end_gradients_at_host(called)
        known = zip(called.inputs, read(node.inputs, values), strict=True)
        return called, {v: x for v, x in known if isinstance(v, Value)}


def linearised(
    of: Computation,
    active: tuple[int, ...],
    types: Sequence[Any] | None = None,
    orders: int = 1,
    *,
    is_kept: bool = True,
    is_last: bool = False,
) -> Linearised | None:
    """The forward pass of an operation with respect to some operands; traced at first.

    None if it cannot be traced: then it cannot be differentiated, and whoever asks for that is told
    why. Perhaps nobody does.

    Args:
      of, active, orders: as of `Linearised`.
      types: those of the operands; default: those of a jitted function.
      is_kept: whether to remember it for another operation that does the same.
      is_last: whether at most one derivative is taken of it.
    """
    key = active, None if types is None else tuple(types), orders
    saved: dict[Any, Linearised | None] = of.saved
    if key in saved:
        return saved[key]
    if types is None:
        types = [v.aval for v in _jax.opened(of.params["jaxpr"]).invars]
    orders = min(orders, _MOST_ORDERS)
    try:  # runs rules, which are anybody's
        own_key = of.keys[0 if is_last else 1]
        everywhere = (Linearised, own_key, key) if is_kept and not of.is_shared else None
        known = None if everywhere is None else PROGRAMS.get(everywhere)
        traced = _trace_orders(of, active, types, orders) if known is None else None
    except Exception:
        saved[key] = None  # with respect to other operands it may have one
        return None
    if traced is not None:
        known = Linearised(of, active, types, orders, own_key, *traced)
    if everywhere is not None:
        PROGRAMS.put(everywhere, known)
    return saved.setdefault(key, known)


def _trace_orders(
    of: Computation, active: tuple[int, ...], types: Sequence[Any], orders: int
) -> tuple[list[_Pass], Graph]:
    """The backward passes of an operation and of its derivatives, as many as there are up to some
    order, and the forward pass that saves what all of them need."""
    run, graph = _as_run(of, types)
    passes: list[_Pass] = []
    for order in range(orders):
        try:
            program, one = _trace(run, graph, types, active)
        except Exception:
            if order == 0:
                raise
            break  # whoever asks for this derivative is told
        passes.append(one)
        graph = import_program(program)
        if TO_HOST in _jax.program_facts(program).primitives:
            # That of a custom rule is differentiated from now on.
            end_gradients_in(graph)

        def run(operands: Sequence[Any], graph: Graph = graph) -> list[Any]:
            return evaluate(graph, operands)

    return passes, graph


def _as_run(
    of: Computation, types: Sequence[Any]
) -> tuple[Callable[[Sequence[Any]], list[Any]], Graph]:
    """An operation as a function of its operands, and as a graph. What it hands to the host is, to
    differentiation, constant there."""
    source = Source(_jax.current_source_info(), None)
    node = lone_node(of.primitive, of.params, types, source)
    end_gradients_at_host(node)

    def run(operands: Sequence[Any]) -> list[Any]:
        return evaluate_node(node, list(operands))

    called = import_program(jax.make_jaxpr(lambda *operands: run(operands))(*types))
    if not of.has_effects:
        return run, called
    in_loops, steps = with_steps(called)

    def run_in_loops(operands: Sequence[Any]) -> list[Any]:
        further = [jnp.zeros(step.shape, step.dtype) for step in steps]
        return evaluate(in_loops, [*operands, *further])

    return run_in_loops, called


def _trace(
    run: Callable[[Sequence[Any]], list[Any]],
    graph: Graph,
    types: Sequence[Any],
    active: tuple[int, ...],
) -> tuple[Any, _Pass]:
    """The forward program ``(*operands) -> (*results, *saved)`` of a function, which is also given
    as a graph, and its backward pass."""
    trees: list[Any] = []  # not returned: JAX remembers the trees of results

    def linearise(*args: Any) -> Any:
        along = _jax.of_some(run, args, active)
        outs, derivative = _jax.linearize(along, *(args[i] for i in active))
        residuals, tree = jax.tree.flatten(derivative)
        trees.append(tree)
        return outs, residuals

    program, (outs, _) = jax.make_jaxpr(linearise, return_shape=True)(*types)
    count = len(outs)
    open_form = _jax.opened(program)

    # What the backward pass needs may be an operand as it is: that is there already. A result that
    # it needs is saved under an identity of its own: what is computed from a gradient is not, by
    # that, computed from the result.
    places = {id(var): i for i, var in enumerate(open_form.invars)}
    kept = list(range(count))
    residuals = []
    for i, var in enumerate(open_form.outvars[count:], count):
        if hasattr(var, "val") or id(var) not in places:
            places[id(var)] = len(types) + len(kept)
            kept.append(i)
        residuals.append(places[id(var)])

    def forward(*args: Any) -> list[Any]:
        results = _jax.eval_program(program, args)
        return [results[i] for i in kept]

    flowing = [i for i, var in enumerate(open_form.outvars[:count]) if _jax.has_gradient(var.aval)]
    saved_types = [var.aval for var in open_form.outvars[count:]]

    @functools.lru_cache(_MOST_BACKWARDS)
    def backward(given: int) -> Any:
        # The others are left out, not given zeros: those would be carried on to a rule, which may
        # return a gradient whatever its cotangent is, and to an infinite derivative, which makes
        # NaN of them.
        chosen = [i for k, i in enumerate(flowing) if given >> k & 1]

        transposes: list[Any] = []

        def transposed(saved: Sequence[Any]) -> list[Any]:
            derivative = jax.tree.unflatten(trees[-1], saved)

            def along(*tangents: Any) -> list[Any]:
                found = derivative(*tangents)
                return [found[i] for i in chosen]

            found = jax.linear_transpose(along, *(types[i] for i in active))
            needs, tree = jax.tree.flatten(found)
            transposes.append(tree)
            return needs

        # What does not depend on the tangents JAX runs to get there. What a recomputed function
        # prints is in the transpose as well: here it would be printed once too often.
        before = import_program(jax.make_jaxpr(transposed)(saved_types))
        if before.effects:
            silence_in(before)

        def transpose(saved: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            needs = evaluate(before, saved)
            return jax.tree.unflatten(transposes[-1], needs)(cotangents)

        return jax.make_jaxpr(transpose)(saved_types, [open_form.outvars[i].aval for i in chosen])

    backward((1 << len(flowing)) - 1)  # raises what JAX raises where there is none
    one = _Pass(count, residuals, backward, _flows(graph, active))
    return jax.make_jaxpr(forward)(*types), one


def _flows(graph: Graph, active: Sequence[int]) -> list[int]:
    """For each active input of a graph the mask of the float outputs that are connected to it."""
    masks = of_each(i in active for i in range(len(graph.inputs)))
    outs = zip(Walk().region(graph, masks), graph.outputs, strict=True)
    flowing = [mask for mask, value in outs if _jax.has_gradient(value.aval)]
    return [joined((mask >> i & 1) << k for k, mask in enumerate(flowing)) for i in active]
