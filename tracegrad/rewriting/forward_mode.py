"""Gives custom gradients a forward-mode derivative: the transpose of their backward pass.

A rule of kind vjp (`jax.custom_vjp`, `tracegrad.custom_gradient`) maps cotangents of its results to
cotangents of its inputs. This map is linear, and its transpose maps tangents of the inputs to
tangents of the results: the transpose is the JVP that `jax.jvp` needs. `with_forward_mode` replaces
each such node, at any depth, with a `jax.custom_jvp` of the same primal.

TensorFlow's ``tf.autodiff.ForwardAccumulator`` treats a ``custom_gradient`` in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Node, Occurrence
from tracegrad.ir.authors import code_of_rule
from tracegrad.ir.dependence import dependence, without_unused
from tracegrad.ir.editing import Op, around_each
from tracegrad.ir.importer import graph_of, trace_vjp
from tracegrad.ir.occurrence import Path, origin_of_function
from tracegrad.ir.running import run_graph, run_node
from tracegrad.rewriting.kept_zeros import keeps_zeros
from tracegrad.rewriting.linearity import TermKinds, adds_constant, zero_outputs
from tracegrad.rewriting.overriding import with_tangents


def with_forward_mode(graph: Graph) -> Graph:
    """Gives every custom gradient of a graph a JVP. Returns a graph without custom gradients
    unchanged; regions that many calls share stay shared.

    A rule whose backward pass is not linear in its cotangents has no transpose: differentiating it
    in forward mode raises ValueError with the rule and its line.
    """
    if _jax.CUSTOM_VJP.name not in graph.operations:
        return graph
    # A function that returns only a gradient also computes the value, whose tangent is not needed.
    return _rewrite(without_unused(graph), (), {})


def _rewrite(graph: Graph, path: Path, done: dict[Graph, Graph]) -> Graph:
    """Gives every custom gradient of the graph at `path` a JVP; `done` caches rewritten regions."""
    if graph in done:
        return done[graph]
    rules = list(_find_vjp_rules(graph, ()))

    def run_with_jvp(op: Op, *operands: Any) -> list[Any]:
        (node,) = op.nodes
        assert isinstance(node, CustomGradient)
        rule = Occurrence((*path, *op.match.path), node)
        primal = _rewrite(node.primal, rule.into("call_jaxpr"), done)
        if keeps_zeros(node):  # that rule concerns zero cotangents, so reverse mode only
            return run_graph(primal, operands)
        return list(_make_jvp_rule(rule, primal)(*operands))

    done[graph] = around_each(graph, rules, run_with_jvp).graph if rules else graph
    return done[graph]


def _find_vjp_rules(graph: Graph, path: Path) -> Iterator[Occurrence]:
    """Yields the custom gradients of kind vjp. Omits custom gradients in the primal of another:
    they are not differentiated."""
    for node in graph.nodes:
        occurrence = Occurrence(path, node)
        if isinstance(node, CustomGradient):
            if node.kind == "vjp":
                yield occurrence
        elif _jax.CUSTOM_VJP.name in _region_operations(node):
            for name, region in node.regions.items():
                yield from _find_vjp_rules(region, occurrence.into(name))


def _region_operations(node: Node) -> set[str]:
    return {op for region in node.regions.values() for op in region.operations}


# ---------------------------------------------------------------------------------- the new rule


def _make_jvp_rule(rule: Occurrence, primal_region: Graph) -> Any:
    """Returns the primal of a custom gradient as a function with a JVP, the rule's transpose."""
    node = rule.node
    out_avals = [value.aval for value in node.outputs]

    def primal(*args: Any) -> list[Any]:
        return run_graph(primal_region, args)

    def run_original(*args: Any) -> list[Any]:
        return run_node(node, args)

    def jvp(
        primals: Sequence[Any], active: Sequence[int], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        # With respect to the active inputs only: a rule may raise for other inputs.
        _require_unchecked_axes(rule)
        with _forbid_endless_transposes(rule):
            passes = _trace_passes(run_original, primals, active)
            _require_linear(passes, rule)
            outs, residuals = passes.forward(primals)
            results = _attach_derivative(passes)([primals[i] for i in active], outs, residuals)
            try:
                out_tangents = passes.transposed(residuals, outs, tangents)
            except Exception as error:  # JAX's message is about reverse mode, which confuses
                if "has no forward-mode derivative" in str(error):
                    raise
                raise ValueError(
                    _refusal_message(rule, f"JAX cannot transpose: {error}")
                ) from error
        return results, _jax.insert_float0(out_avals, out_tangents)

    return with_tangents(primal, node.name, jvp)


# The rules that are being transposed now, outermost first: each rule's code and primal function.
_transposed_now: ContextVar[tuple[Any, ...]] = ContextVar("transposed_now", default=())
# How often the transpose of a rule may need its own transpose: more than once, since a library may
# make different rules from the same code.
_MAX_RECURSION = 4


@contextmanager
def _forbid_endless_transposes(rule: Occurrence) -> Iterator[None]:
    """While this context is open, the backward pass of a custom gradient is transposed. Raises
    ValueError for an endless recursion: the backward pass of a solver calls the solver with the
    cotangent, so the transpose of the backward pass needs itself."""
    node = rule.node
    assert isinstance(node, CustomGradient)
    key, outer = (code_of_rule(node), node.primal.function_source), _transposed_now.get()
    if outer.count(key) == _MAX_RECURSION:
        raise ValueError(
            _refusal_message(rule, "calls the rule again, so that transposing it would never end")
        )
    token = _transposed_now.set((*outer, key))
    try:
        yield
    finally:
        _transposed_now.reset(token)


def _attach_derivative(passes: _Passes) -> Any:
    """Returns ``(inputs, results, residuals) -> results`` with the rule's derivative by the inputs:
    higher derivatives of the results must also come from the rule, not from the operations of the
    forward pass."""

    def results(inputs: Any, outs: Any, residuals: Any) -> Any:
        return outs

    def tangent(primals: Any, tangents: Any) -> Any:
        _, outs, residuals = primals
        out_tangents = passes.transposed(residuals, outs, tangents[0])
        return _jax.insert_float0([jax.typeof(out) for out in outs], out_tangents)

    return _jax.with_tangent(results, tangent)


@dataclass(frozen=True)
class _Passes:
    """The two passes of a custom gradient, which is differentiated by its active inputs."""

    forward_graph: Graph  # inputs -> results, residuals
    # residuals, cotangents of the float results -> cotangents of the active inputs
    backward_graph: Graph
    result_count: int
    cotangent_types: list[Any]

    def forward(self, primals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the results and the residuals."""
        outs = run_graph(self.forward_graph, primals)
        return outs[: self.result_count], outs[self.result_count :]

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Returns the cotangents of the active inputs."""
        return run_graph(self.backward_graph, [*residuals, *cotangents])

    def transposed(
        self, residuals: Sequence[Any], outs: Sequence[Any], tangents: Sequence[Any]
    ) -> list[Any]:
        """Maps the tangents of the active inputs to the tangents of the float results.

        JAX cannot transpose some linear operations (scatter), but can transpose their derivatives.
        So this function transposes the derivative of the backward pass, which equals the backward
        pass. The derivative is the same at all cotangents; the results serve as cotangents, since
        they have the right types.
        """
        any_cotangents = [out for out in outs if _jax.has_gradient(jax.typeof(out))]
        _, transpose = _jax.vjp(lambda *cts: self.backward(residuals, cts), *any_cotangents)
        return list(transpose(list(tangents)))


def _trace_passes(
    run: Callable[..., list[Any]], primals: Sequence[Any], active: Sequence[int]
) -> _Passes:
    """Traces both passes of a custom gradient, so that its residuals become explicit."""

    forward, backward, residuals, cotangents = trace_vjp(
        lambda operands: run(*operands), list(map(jax.typeof, primals)), active
    )
    graph = graph_of(forward)
    # Both may contain custom gradients, even this one, and may be differentiated again.
    return _Passes(
        with_forward_mode(graph),
        with_forward_mode(graph_of(backward)),
        len(graph.outputs) - residuals,
        cotangents,
    )


def _require_linear(passes: _Passes, rule: Occurrence) -> None:
    """Raises ValueError unless the backward pass is linear in the cotangents: its derivative does
    not depend on a cotangent; if a result depends on a cotangent, its derivative by that cotangent
    is not zero; and no constant is added to the linear part."""
    types, avals = passes.cotangent_types, passes.backward_graph.in_avals
    count, split = len(types), len(avals) - len(types)

    def derivative(residuals: list[Any], cotangents: list[Any], tangents: list[Any]) -> Any:
        return _jax.jvp(lambda cts: passes.backward(residuals, cts), (cotangents,), (tangents,))

    masks = dependence(graph_of(jax.make_jaxpr(derivative)(avals[:split], types, types)))
    on_cotangents = ((1 << count) - 1) << split
    on_tangents = on_cotangents << count
    half = len(masks) // 2
    for value, tangent in zip(masks[:half], masks[half:], strict=True):
        if tangent & on_cotangents:
            raise ValueError(_not_linear_message(rule, "its derivative depends on the cotangent"))
        if (value & on_cotangents) << count & ~tangent & on_tangents:
            raise ValueError(_not_linear_message(rule, "its derivative by the cotangent is zero"))
    zeros = zero_outputs(passes.forward_graph)[passes.result_count :]
    residuals = [TermKinds.ZERO if zero else TermKinds.CONSTANT for zero in zeros]
    if adds_constant(passes.backward_graph, residuals + [TermKinds.LINEAR] * count):
        raise ValueError(_not_linear_message(rule, "a constant is added to it"))


def _require_unchecked_axes(rule: Occurrence) -> None:
    """Raises ValueError in a `shard_map` that checks over which mesh axes values vary: the new JVP
    is traced outside of the mesh, where JAX does not compute these axes."""
    for value in rule.node.inputs:
        if axes := _jax.varying_axes(value.aval):
            raise ValueError(
                f"the custom gradient {rule.node.name}{line_of_rule(rule)} is in a shard_map and "
                f"varies over its axes {', '.join(map(str, axes))}: it can get a forward-mode "
                "derivative only with jax.shard_map(..., check_vma=False)"
            )


def _not_linear_message(rule: Occurrence, reason: str) -> str:
    return _refusal_message(rule, f"is not linear in the cotangent ({reason})")


def _refusal_message(rule: Occurrence, reason: str) -> str:
    assert isinstance(rule.node, CustomGradient)
    return (
        f"the custom gradient {rule.node.name}{line_of_rule(rule)} has no forward-mode "
        f"derivative: that is the transpose of its backward, which {reason}. If the backward "
        "solves a linear system, let it call jax.lax.custom_linear_solve, also around a solver of "
        "jax.scipy.sparse.linalg, which has no transpose by itself; otherwise use reverse mode "
        "throughout, as in jax.jacrev(jax.grad(f)). (A while loop in the backward has no reverse "
        "mode, either.)"
    )


def line_of_rule(rule: Occurrence) -> str:
    """Returns the line that calls a custom gradient or, if unknown, the line that defines it."""
    assert isinstance(rule.node, CustomGradient)
    if rule.origin is not None:
        return f" at {rule.origin}"
    function = origin_of_function(rule.node.primal.function_source)
    return f" defined at {function.place}" if function else ""
