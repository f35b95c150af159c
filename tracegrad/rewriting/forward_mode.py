"""Gives custom gradients a forward-mode derivative: the transpose of their backward.

A rule of kind vjp (`jax.custom_vjp`, `tracegrad.custom_gradient`) says how cotangents of its
results become cotangents of its inputs. That map is linear, and its transpose takes tangents of the
inputs to tangents of the results: the rule's JVP, where `jax.jvp` refuses. The pass puts a
`jax.custom_jvp` of the same primal in the place of each such node, at any depth.

The idea is TensorFlow's, whose ``tf.autodiff.ForwardAccumulator`` does it to a ``custom_gradient``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Node, Occurrence, RegionNode
from tracegrad.ir.occurrence import Path
from tracegrad.lowering import Lowering, evaluate_node
from tracegrad.rewriting.linearity import Part, constant_part, zero_outputs
from tracegrad.tracing.importer import import_program


def with_forward_mode(graph: Graph) -> Graph:
    """A graph in which every custom gradient has a JVP; the same graph if it holds none.

    Requires nothing of the graph. Regions that many calls share stay shared.

    A rule whose backward is not linear in its cotangents has no transpose: differentiating it
    forward raises ValueError, which names the rule and its line.
    """
    return _rewritten(graph, (), {})


def _rewritten(graph: Graph, path: Path, done: dict[Graph, Graph]) -> Graph:
    if graph in done:
        return done[graph]
    regions: dict[Node, dict[str, Graph]] = {}
    for node in graph.nodes:
        # The primal of a rule is not what is differentiated.
        if isinstance(node, RegionNode) and not isinstance(node, CustomGradient):
            new = {
                name: _rewritten(region, (*path, (node, name)), done)
                for name, region in node.regions.items()
            }
            if any(new[name] is not region for name, region in node.regions.items()):
                regions[node] = new
    rules = [n for n in graph.nodes if isinstance(n, CustomGradient) and n.kind == "vjp"]
    if not rules and not regions:
        done[graph] = graph
        return graph
    result = done[graph] = graph.copy()
    for node, here in list(zip(graph.nodes, result.nodes, strict=True)):
        if node in regions:
            assert isinstance(here, RegionNode)
            for name, region in regions[node].items():
                here._regions[name] = region
                region.add_owner(here)
        elif node in rules:
            _replace(result, here, Occurrence(path, node))
    return result


def _replace(graph: Graph, node: Node, found: Occurrence) -> None:
    avals = [value.aval for value in node.inputs]
    # A fresh function: JAX caches traces by the identity of the function.
    rule = _forward_rule(found)
    program = jax.make_jaxpr(lambda *args: rule(*args))(*avals)
    results = graph.insert(import_program(program, name=found.node.name), node.inputs, before=node)
    for old, new in zip(node.outputs, results, strict=True):
        graph.replace_uses(old, new)
    node.effects = frozenset()  # the new node has them
    graph.erase(node)


# ---------------------------------------------------------------------------------- the new rule


def _forward_rule(found: Occurrence) -> Any:
    """The function of a custom gradient with a JVP instead of a VJP, on flat arguments."""
    node = found.node
    out_avals = [value.aval for value in node.outputs]

    def primal(*args: Any) -> list[Any]:
        return evaluate_node(node, list(args), Lowering())

    primal.__name__ = primal.__qualname__ = node.name
    rule = jax.custom_jvp(primal)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        # Only what is differentiated: a rule may have no gradient for the rest, and say so.
        active = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        active = [i for i in active if _jax.has_gradient(jax.typeof(primals[i]))]
        backward = _Backward(found, primal, primals, active)
        outs, residuals = backward.forward(primals)
        given = [tangents[i] for i in active]
        marked = _with_derivative(backward)([primals[i] for i in active], outs, residuals)
        return marked, _jax.align(out_avals, backward.transposed(residuals, given))

    rule.defjvp(jvp, symbolic_zeros=True)
    return rule


def _with_derivative(backward: _Backward) -> Any:
    """``(inputs, results, residuals) -> results``, whose derivative by the inputs is the rule's.

    Differentiated once more, the results must not go through the operations that the forward pass
    is made of: their derivative is the rule, at any order.
    """

    @jax.custom_jvp
    def results(inputs: Any, outs: Any, residuals: Any) -> Any:
        return outs

    @results.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        _, outs, residuals = primals
        flowing = backward.transposed(residuals, tangents[0])
        return results(*primals), _jax.align([jax.typeof(out) for out in outs], flowing)

    return results


class _Backward:
    """The two passes of a custom gradient, traced with respect to some of its inputs."""

    def __init__(
        self,
        found: Occurrence,
        primal: Callable[..., list[Any]],
        primals: Sequence[Any],
        active: Sequence[int],
    ):
        self.found = found
        avals = [jax.typeof(p) for p in primals]

        def forward(*args: Any) -> tuple[list[Any], Any]:
            def along(*chosen: Any) -> list[Any]:
                operands = list(args)
                for i, value in zip(active, chosen, strict=True):
                    operands[i] = value
                return primal(*operands)

            return jax.vjp(along, *(args[i] for i in active))

        self._forward, shapes = jax.make_jaxpr(forward, return_shape=True)(*avals)
        out_shapes, pullback_shape = shapes
        residual_shapes, pullback_tree = jax.tree.flatten(pullback_shape)
        self._count = len(out_shapes)

        def backward(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            pullback = jax.tree.unflatten(pullback_tree, residuals)
            return list(pullback(_jax.align(out_shapes, cotangents)))

        self._cotangents = [shape for shape in out_shapes if _jax.has_gradient(shape)]
        # Traced here, so that an error in the user's rule is raised as it is, not as one of ours.
        self._backward = jax.make_jaxpr(backward)(residual_shapes, self._cotangents)

    def forward(self, primals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results and the residuals."""
        results = _jax.eval_program(self._forward, primals)
        return results[: self._count], results[self._count :]

    def transposed(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """The tangents of the float results, from those of the inputs that are differentiated."""
        self._refuse_constant_part()

        def linear(*cotangents: Any) -> list[Any]:
            return _jax.eval_program(self._backward, [*residuals, *cotangents])

        transpose = jax.linear_transpose(linear, *self._cotangents)
        try:
            return list(transpose(list(tangents)))
        except Exception as error:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ValueError(f"{self._refusal()} (JAX: {reason})") from error

    def _refuse_constant_part(self) -> None:
        """JAX's transposition drops what a function adds to a linear one, without a word."""
        zeros = zero_outputs(import_program(self._forward))[self._count :]
        residuals = [Part.ZERO if zero else Part.CONSTANT for zero in zeros]
        cotangents = [Part.LINEAR] * len(self._cotangents)
        added = constant_part(import_program(self._backward), residuals + cotangents)
        if added is not None:
            raise ValueError(f"{self._refusal()} ({added})")

    def _refusal(self) -> str:
        origin = self.found.origin
        return (
            f"the custom gradient {self.found.node.name}"
            + ("" if origin is None else f" at {origin}")
            + " has no forward-mode derivative: that is the transpose of its backward, which is not"
            " linear in the cotangent"
        )
