"""A compiled function that saves, as it runs, what its derivative needs.

Under a tape a jitted function runs its forward pass as JAX differentiates it: the values in the
middle on which the derivative depends come out with its results. So the backward pass does not run
it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.differentiation.pull_back import node_vjp
from tracegrad.ir import Graph, Node, Value
from tracegrad.ir.dependence import joined
from tracegrad.tape.computations import Computation
from tracegrad.tracing.importer import import_program, make_node


class Linearised(Computation):
    """The forward pass of a jitted function, with respect to some of its operands.

    Attributes:
      forward: runs it: ``(*operands) -> (*results, *saved)``.
      original: the parameters of the function itself.
      count: how many results the function has; after them comes what it saves.
    """

    __slots__ = ("_active", "_backward", "_flows", "_residuals", "count", "forward", "original")

    def __init__(self, of: Computation, active: tuple[int, ...]):
        """Args:
        of: a jitted function, without effects.
        active: the positions of the operands of which derivatives may be wanted.
        """
        self.original = of.params
        self._active = active
        types = [v.aval for v in _jax.opened(of.params["jaxpr"]).invars]
        forward, self._residuals, self.count, self._backward = _trace(of.params, types, active)
        self._flows = _flows(import_program(of.params["jaxpr"]), active)
        self.forward: Callable[..., list[Any]] = jax.jit(forward)
        (equation,) = _jax.opened(jax.make_jaxpr(self.forward)(*types)).eqns
        super().__init__(_jax.JIT, dict(equation.params), key=("linearised", of.keys[1], active))

    def pull_back(
        self,
        node: Node,
        values: Mapping[Value, Any],
        cotangents: Sequence[Any],
        active: Sequence[int],
    ) -> list[Any]:
        """The cotangents of operands of a node of this computation, as `node_vjp` gives them."""
        of_results, of_saved = cotangents[: self.count], cotangents[self.count :]
        terms: list[list[Any]] = []
        if any(ct is not None for ct in of_results):
            if set(active) <= set(self._active):
                found = dict(zip(self._active, self._pull_back(node, values, of_results)))
                terms.append([found[i] for i in active])
            else:
                plain, known = self._as_called(node, values)
                terms.append(node_vjp(plain, known, of_results, active))
        if any(ct is not None for ct in of_saved):
            # Whoever differentiates a backward pass that used them goes through the forward pass.
            terms.append(node_vjp(node, values, [None] * self.count + list(of_saved), active))
        return [_sum(each) for each in zip(*terms, strict=True)]

    def _pull_back(
        self, node: Node, values: Mapping[Value, Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        every = [values[v] for v in (*node.inputs, *node.outputs) if isinstance(v, Value)]
        residuals = [every[place] for place in self._residuals]
        seeds: list[Any] = []
        given = 0
        for value, ct in zip(node.outputs, cotangents):
            if _jax.has_gradient(value.aval):
                given |= (ct is not None) << len(seeds)
                seeds.append(jnp.zeros(value.aval.shape, value.aval.dtype) if ct is None else ct)
        found = _jax.eval_program(self._backward, [*residuals, *seeds])
        return [ct if flow & given else None for ct, flow in zip(found, self._flows, strict=True)]

    def _as_called(self, node: Node, values: Mapping[Value, Any]) -> tuple[Node, dict[Value, Any]]:
        """The node of the function itself in the place of its forward pass, with its values."""
        assert node.source is not None
        graph = Graph(node.name)
        inputs = tuple(graph.add_input(value.aval) for value in node.inputs)
        plain = make_node(_jax.JIT, self.original, inputs, node.source, (), {})
        graph.append(plain, [value.aval for value in node.outputs[: self.count]])
        given = [values[v] for v in node.inputs if isinstance(v, Value)]
        return plain, dict(zip(inputs, given, strict=True))


def _flows(graph: Graph, active: Sequence[int]) -> list[int]:
    """For each active input of a graph the mask of the float outputs that are connected to it."""
    masks = [1 << i if i in active else 0 for i in range(len(graph.inputs))]
    outs = zip(Walk().region(graph, masks), graph.outputs, strict=True)
    flowing = [mask for mask, value in outs if _jax.has_gradient(value.aval)]
    return [joined((mask >> i & 1) << k for k, mask in enumerate(flowing)) for i in active]


def _sum(terms: Sequence[Any]) -> Any:
    known = [term for term in terms if term is not None]
    return sum(known[1:], known[0]) if known else None


def linearised(of: Computation, active: tuple[int, ...]) -> Linearised | None:
    """The forward pass of a jitted function with respect to some operands; traced at first.

    None if it cannot be traced: then it cannot be differentiated, and whoever asks for that is told
    why. Perhaps nobody does.
    """
    known: Linearised | None = of.saved.get(active)
    if known is None:
        try:
            known = of.saved.setdefault(active, Linearised(of, active))
        except Exception:
            of.saves = False
    return known


def _trace(
    params: Mapping[str, Any], types: Sequence[Any], active: Sequence[int]
) -> tuple[Any, list[int], int, Any]:
    """The forward function, where its residuals are among its operands and what it saves, how many
    results the differentiated function has, and the backward program
    ``(*residuals, *cotangents) -> cotangents of the active operands``."""
    trees: list[Any] = []  # not returned: JAX remembers the trees of results

    def vjp(*args: Any) -> Any:
        along = _jax.of_some(lambda operands: _jax.bind(_jax.JIT, operands, params), args, active)
        outs, pullback = jax.vjp(along, *(args[i] for i in active))
        residuals, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        return outs, residuals

    program, (outs, saved) = jax.make_jaxpr(vjp, return_shape=True)(*types)
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

    forward.__name__ = forward.__qualname__ = str(params["name"])

    def backward(*residuals_and_cotangents: Any) -> Any:
        pullback = jax.tree.unflatten(trees[-1], residuals_and_cotangents[: len(saved)])
        return pullback(_jax.align(outs, residuals_and_cotangents[len(saved) :]))

    given = [var.aval for var in open_form.outvars[:count] if _jax.has_gradient(var.aval)]
    saved_types = [var.aval for var in open_form.outvars[count:]]
    return forward, residuals, count, jax.make_jaxpr(backward)(*saved_types, *given)
