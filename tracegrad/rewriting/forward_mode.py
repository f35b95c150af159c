"""Gives custom gradients a forward-mode derivative: the transpose of their backward.

A rule of kind vjp (`jax.custom_vjp`, `tracegrad.custom_gradient`) says how cotangents of its
results become cotangents of its inputs. That map is linear, and its transpose takes tangents of the
inputs to tangents of the results: the rule's JVP, where `jax.jvp` refuses. The pass puts a
`jax.custom_jvp` of the same primal in the place of each such node, at any depth.

The idea is TensorFlow's, whose ``tf.autodiff.ForwardAccumulator`` does it to a ``custom_gradient``.
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
from tracegrad.ir.importer import import_program
from tracegrad.ir.occurrence import Path, origin_of_function
from tracegrad.ir.running import run_graph, run_node
from tracegrad.rewriting.kept_zeros import keeps_zeros
from tracegrad.rewriting.linearity import Part, constant_part, zero_outputs
from tracegrad.rewriting.overriding import with_tangent, with_tangents


def with_forward_mode(graph: Graph) -> Graph:
    """A graph in which every custom gradient has a JVP; the same graph if it holds none.

    Requires nothing of the graph. Regions that many calls share stay shared.

    A rule whose backward is not linear in its cotangents has no transpose: differentiating it
    forward raises ValueError, which names the rule and its line.
    """
    if _jax.CUSTOM_VJP.name not in graph.operations:
        return graph
    # A function that returns the gradient of its value leaves that, whose tangent nobody wants.
    return _rewritten(without_unused(graph), (), {})


def _rewritten(graph: Graph, path: Path, done: dict[Graph, Graph]) -> Graph:
    if graph in done:
        return done[graph]
    rules = list(_rules(graph, ()))

    def forward(op: Op, *operands: Any) -> list[Any]:
        (node,) = op.nodes
        assert isinstance(node, CustomGradient)
        found = Occurrence((*path, *op.match.path), node)
        primal = _rewritten(node.primal, found.into("call_jaxpr"), done)
        if keeps_zeros(node):  # in reverse alone: tangents have no zeros that stand for nothing
            return run_graph(primal, operands)
        return list(_forward_rule(found, primal)(*operands))

    done[graph] = around_each(graph, rules, forward).graph if rules else graph
    return done[graph]


def _rules(graph: Graph, path: Path) -> Iterator[Occurrence]:
    """The custom gradients of kind vjp that are differentiated: the primal of a rule is not."""
    for node in graph.nodes:
        found = Occurrence(path, node)
        if isinstance(node, CustomGradient):
            if node.kind == "vjp":
                yield found
        elif _jax.CUSTOM_VJP.name in _operations(node):
            for name, region in node.regions.items():
                yield from _rules(region, found.into(name))


def _operations(node: Node) -> set[str]:
    return {op for region in node.regions.values() for op in region.operations}


# ---------------------------------------------------------------------------------- the new rule


def _forward_rule(found: Occurrence, primal_region: Graph) -> Any:
    """The function of a custom gradient with a JVP instead of a VJP, on flat arguments."""
    node = found.node
    out_avals = [value.aval for value in node.outputs]

    def primal(*args: Any) -> list[Any]:
        return run_graph(primal_region, args)

    def original(*args: Any) -> list[Any]:
        return run_node(node, args)

    def differentiated(
        primals: Sequence[Any], active: Sequence[int], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        # By what is active alone: a rule may have no gradient for the rest, and say so.
        _require_unchecked_axes(found)
        with _transposing(found):
            passes = _trace_passes(original, primals, active)
            _require_linear(passes, found)
            outs, residuals = passes.forward(primals)
            marked = _with_derivative(passes)([primals[i] for i in active], outs, residuals)
            try:
                flowing = passes.transposed(residuals, outs, tangents)
            except Exception as error:  # JAX's words are about reverse mode, which nobody asked for
                if "has no forward-mode derivative" in str(error):
                    raise
                raise ValueError(_refusal(found, f"JAX cannot transpose: {error}")) from error
        return marked, _jax.align(out_avals, flowing)

    return with_tangents(primal, node.name, differentiated)


# The rules that are being transposed now, the outermost first, by their code and their function.
_transposed_now: ContextVar[tuple[Any, ...]] = ContextVar("transposed_now", default=())
# So many times the transpose of a rule may ask for its own. More than one may be of other rules
# that a library makes by one function.
_MOST_IN_ITSELF = 4


@contextmanager
def _transposing(found: Occurrence) -> Iterator[None]:
    """A block that transposes the backward of a custom gradient.

    Raises ValueError where that asks for its own transpose without end: the backward of a solver
    calls the solver with the cotangent.
    """
    node = found.node
    assert isinstance(node, CustomGradient)
    rule, around = (code_of_rule(node), node.primal.function_source), _transposed_now.get()
    if around.count(rule) == _MOST_IN_ITSELF:
        raise ValueError(
            _refusal(found, "calls it again, whose transpose is asked for without end")
        )
    token = _transposed_now.set((*around, rule))
    try:
        yield
    finally:
        _transposed_now.reset(token)


def _with_derivative(passes: _Passes) -> Any:
    """``(inputs, results, residuals) -> results``, whose derivative by the inputs is the rule's.

    Differentiated once more, the results must not go through the operations that the forward pass
    is made of: their derivative is the rule, at any order.
    """

    def tangent(primals: Any, tangents: Any) -> Any:
        _, outs, residuals = primals
        flowing = passes.transposed(residuals, outs, tangents[0])
        return _jax.align([jax.typeof(out) for out in outs], flowing)

    @with_tangent(tangent)
    def results(inputs: Any, outs: Any, residuals: Any) -> Any:
        return outs

    return results


@dataclass(frozen=True)
class _Passes:
    """The two passes of a custom gradient, traced with respect to some of its inputs."""

    forward_graph: Graph  # inputs -> results, residuals
    backward_graph: Graph  # residuals, cotangents of the float results -> of those inputs
    result_count: int
    cotangents: list[Any]  # their types

    def forward(self, primals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results and the residuals."""
        outs = run_graph(self.forward_graph, primals)
        return outs[: self.result_count], outs[self.result_count :]

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The cotangents of the inputs that are differentiated."""
        return run_graph(self.backward_graph, [*residuals, *cotangents])

    def transposed(
        self, residuals: Sequence[Any], outs: Sequence[Any], tangents: Sequence[Any]
    ) -> list[Any]:
        """The tangents of the float results, from those of the inputs that are differentiated.

        By way of the derivative, which a linear function equals: of some linear operations JAX
        can transpose the derivative only (a scatter). It is the same everywhere; the results
        are a place of the right type.
        """
        anywhere = [out for out in outs if _jax.has_gradient(jax.typeof(out))]
        _, transpose = _jax.vjp(lambda *cts: self.backward(residuals, cts), *anywhere)
        return list(transpose(list(tangents)))


def _trace_passes(
    rule: Callable[..., list[Any]], primals: Sequence[Any], active: Sequence[int]
) -> _Passes:
    """Traces the rule, so that what it keeps for the backward pass becomes explicit."""

    def forward(*args: Any) -> tuple[list[Any], Any]:
        return _jax.vjp_of_some(lambda operands: rule(*operands), args, active)

    forward_program, shapes = jax.make_jaxpr(forward, return_shape=True)(*map(jax.typeof, primals))
    outs, pullback_shape = shapes
    residuals, pullback_tree = jax.tree.flatten(pullback_shape)

    def backward(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        pullback = jax.tree.unflatten(pullback_tree, residuals)
        return list(pullback(_jax.align(outs, cotangents)))

    cotangents = [shape for shape in outs if _jax.has_gradient(shape)]
    backward_program = jax.make_jaxpr(backward)(residuals, cotangents)
    # Both may be made of custom gradients, this very one among them, and be differentiated again.
    return _Passes(
        with_forward_mode(import_program(forward_program)),
        with_forward_mode(import_program(backward_program)),
        len(outs),
        cotangents,
    )


def _require_linear(passes: _Passes, found: Occurrence) -> None:
    """Raises ValueError unless the backward is linear in the cotangents.

    Its derivative then does not depend on where it is taken, and depends on a direction where the
    value does; and nothing is added to the linear part.
    """
    split = len(passes.backward_graph.inputs) - len(passes.cotangents)

    def derivative(residuals: list[Any], cotangents: list[Any], tangents: list[Any]) -> Any:
        return _jax.jvp(lambda cts: passes.backward(residuals, cts), (cotangents,), (tangents,))

    avals = passes.backward_graph.in_avals
    program = jax.make_jaxpr(derivative)(avals[:split], passes.cotangents, passes.cotangents)
    masks = dependence(import_program(program))
    count = len(passes.cotangents)
    here, along = (((1 << count) - 1) << split << shift for shift in (0, count))
    half = len(masks) // 2
    for value, tangent in zip(masks[:half], masks[half:], strict=True):
        if tangent & here:
            raise ValueError(_not_linear(found, "its derivative depends on the cotangent"))
        if (value & here) << count & ~tangent & along:
            raise ValueError(_not_linear(found, "its derivative by the cotangent is zero"))
    zeros = zero_outputs(passes.forward_graph)[passes.result_count :]
    residuals = [Part.ZERO if zero else Part.CONSTANT for zero in zeros]
    added = constant_part(passes.backward_graph, residuals + [Part.LINEAR] * count)
    if added is not None:
        raise ValueError(_not_linear(found, added))


def _require_unchecked_axes(found: Occurrence) -> None:
    """Raises ValueError in a `shard_map` that checks over which axes values vary.

    The new rule is traced outside of the mesh, where JAX does not work that out.
    """
    for value in found.node.inputs:
        if axes := _jax.varying_axes(value.aval):
            raise ValueError(
                f"the custom gradient {found.node.name}{place_of(found)} stands in a shard_map "
                f"and varies over its axes {', '.join(map(str, axes))}: a forward-mode "
                "derivative can be made of it only with jax.shard_map(..., check_vma=False)"
            )


def _not_linear(found: Occurrence, reason: str) -> str:
    return _refusal(found, f"is not linear in the cotangent ({reason})")


def _refusal(found: Occurrence, reason: str) -> str:
    assert isinstance(found.node, CustomGradient)
    return (
        f"the custom gradient {found.node.name}{place_of(found)} has no forward-mode derivative: "
        f"that is the transpose of its backward, which {reason}"
    )


def place_of(found: Occurrence) -> str:
    """Where a custom gradient is called or, if the line is not known, where it is defined."""
    assert isinstance(found.node, CustomGradient)
    if found.origin is not None:
        return f" at {found.origin}"
    function = origin_of_function(found.node.primal.function_source)
    return f" defined at {function.place}" if function else ""
