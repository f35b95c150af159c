"""Keeps NaN and Inf out of gradients where a derivative is not finite and its cotangent is zero.

A backward pass multiplies cotangents by factors (such as ``0.5 / sqrt(x)``), and zero times
infinity is NaN. So an operation gets a custom gradient: JAX's own backward pass, as a graph in
which a select follows each product of a cotangent and a factor. Where the cotangent is zero and the
product is not finite, the select returns zero. A matrix product or convolution, which sums
products, omits such products from its sum. The operations of this backward pass get such custom
gradients too, for higher derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad._jax.caches import Cache
from tracegrad.ir import (
    Apply,
    CustomGradient,
    Graph,
    Literal,
    Node,
    Value,
    dtype_of,
    has_gradient,
    operations,
)
from tracegrad.ir.authors import file_of_primal
from tracegrad.ir.dependence import without_unused
from tracegrad.ir.editing import Op, around_each
from tracegrad.ir.importer import graph_of
from tracegrad.ir.occurrence import Occurrence, Path
from tracegrad.ir.running import run_graph, run_node
from tracegrad.rewriting.overriding import with_gradient

Run = Callable[..., list[Any]]

# ------------------------------------------------------------------- which nodes are rewritten


def may_make_nan(occurrence: Occurrence) -> bool:
    """Whether the derivative at a node may be NaN or Inf.

    This concerns elementwise operations, contractions (a matrix product or a convolution), and
    custom gradients of kind "jvp", if their backward pass multiplies cotangents by factors that are
    not constant. Operations with bounded derivatives are excluded, and so are nodes inside a custom
    gradient or a solve, since these nodes are not differentiated.
    """
    return occurrence.rule_around is None and _may_multiply_zeros(occurrence.node)


def _may_multiply_zeros(node: Node) -> bool:
    if isinstance(node, CustomGradient):
        arguments = node.inputs[node.closed_over :]  # closed-over values have no gradient
        count = sum(isinstance(v, Value) for v in arguments)
        return node.kind == "jvp" and _has_factors(node, [v.aval for v in node.operands], count)
    is_sum = node.op in operations.CONTRACTIONS
    may_be_infinite = node.op in operations.BY_ELEMENT and node.op not in operations.BOUNDED
    if not isinstance(node, Apply) or not (is_sum or may_be_infinite):
        return False
    return has_gradient(node.outputs[0]) and (is_sum or _is_nonlinear(node))


# Caches whether the derivative of an operation has factors that are not constant. For the
# operations of twelve layers, `_is_nonlinear` takes 3 ms with this cache and 180 ms without.
_NONLINEAR_CACHE: Cache[Any, bool] = Cache(1024)


def _is_nonlinear(node: Node) -> bool:
    dtypes = tuple(value.aval.dtype for value in node.inputs)
    literals = tuple(None if isinstance(v, Value) else str(v.val) for v in node.inputs)
    key = node.primitive, str(dict(node.params)), dtypes, literals
    answer = _NONLINEAR_CACHE.get(key)
    if answer is None:  # an elementwise operation has the same answer for scalars as for arrays
        scalars = [_jax.struct((), dtype_of(value)) for value in node.operands]
        answer = _has_factors(node, scalars, len(scalars))
        _NONLINEAR_CACHE.put(key, answer)
    return answer


def _has_factors(node: Node, avals: Sequence[Any], count: int) -> bool:
    """Whether the backward pass of a node, differentiated with respect to its last `count`
    operands, multiplies cotangents by factors that are not constant."""
    first = len(avals) - count
    active = [i for i in range(first, len(avals)) if _jax.has_gradient(avals[i])]
    if not active:
        return False
    try:
        graph = _backward_graph(_run_on_values(node), avals, active)
    except Exception:  # the node has no derivative; differentiating it raises JAX's own error
        return False
    cotangents = range(len(avals), len(graph.inputs))
    return any(_find_factors(graph, cotangents, (), lambda node: False))


# ---------------------------------------------------------------------------- rewriting the nodes


def replace_keeping_zeros(every: bool) -> Callable[..., list[Any]]:
    """Returns ``function(op, *operands)``, the replacement for a matched node.

    The replacement has the same values and the same forward mode; its backward pass keeps zeros.
    With `every`, a product that is not finite becomes zero for every finite cotangent; else only
    for a zero cotangent.
    """

    def replacement(op: Op, *operands: Any) -> list[Any]:
        (node,) = op.nodes
        return _attach_zero_keeping_gradient(_run_on_values(node), node.name, every)(
            *_drop_literals(node, operands)
        )

    return replacement


def keeps_zeros(node: CustomGradient) -> bool:
    """Whether this module made a custom gradient, which has the name of the node it replaces."""
    return file_of_primal(node) == __file__


def _attach_zero_keeping_gradient(run: Run, name: str, every: bool) -> Run:
    def primal(*operands: Any) -> list[Any]:
        return run(*operands)

    def gradient(op: Any, *dys: Any, active: Sequence[int]) -> list[Any]:
        active = [i for i in active if _jax.has_gradient(op.inputs[i])]
        float_dys = [dy for dy, out in zip(dys, op.outputs, strict=True) if _jax.has_gradient(out)]
        backward = _backward_graph(run, list(map(jax.typeof, op.inputs)), active)
        backward = _keep_zeros_in(backward, len(float_dys), every)
        cotangents: list[Any] = [None] * len(op.inputs)
        for i, ct in zip(active, run_graph(backward, [*op.inputs, *float_dys]), strict=True):
            cotangents[i] = ct
        return cotangents

    primal.__name__ = primal.__qualname__ = name
    return with_gradient(primal, gradient, {}, name, None, passes_active=True)


def _backward_graph(run: Run, avals: Sequence[Any], active: Sequence[int]) -> Graph:
    """Returns the backward pass of a function as a graph. The inputs are the operands, and the
    cotangents of the results that have a gradient. The outputs are the cotangents of the operands
    at the positions `active`."""
    outs = jax.make_jaxpr(run)(*avals).out_avals
    float_results = [j for j, out in enumerate(outs) if _jax.has_gradient(out)]

    def pull(operands: list[Any], cotangents: list[Any]) -> Any:
        _, back = _jax.vjp_of_some(lambda xs: run(*xs), operands, active, float_results)
        return back(cotangents)

    graph = graph_of(jax.make_jaxpr(pull)(list(avals), [outs[j] for j in float_results]))
    # The forward pass has run already, with its effects: the graph need not repeat them.
    return without_unused(graph, keeps_effects=False)


def _keep_zeros_in(graph: Graph, count: int, every: bool) -> Graph:
    """Rewrites a backward graph, whose last `count` inputs are cotangents, so that it keeps zeros.
    A select follows each product of a cotangent and a factor. The operations that compute factors
    get custom gradients, so that second derivatives keep zeros, too."""
    inputs = range(len(graph.inputs))
    positions = dict(_find_factors(graph, inputs[len(inputs) - count :], (), _may_multiply_zeros))

    def replacement(op: Op, *operands: Any) -> list[Any]:
        (node,) = op.nodes
        run, position = _run_on_values(node), positions[op.match]
        if position is not None:
            if node.op in operations.CONTRACTIONS:
                run = _keep_zeros_in_contraction(run, position, node.name, every)
            else:
                run = _keep_zeros_in_product(run, position, every)
        return _attach_zero_keeping_gradient(run, node.name, every)(*_drop_literals(node, operands))

    return around_each(graph, list(positions), replacement, depends_on=positions.__getitem__).graph


def _keep_zeros_in_product(run: Run, position: int, every: bool) -> Run:
    """Wraps `run`, a product of factors and the cotangent at `position`, to keep zeros. A product
    that is not finite becomes zero where the cotangent is zero (with `every`: finite)."""

    def product(*values: Any) -> list[Any]:
        ct, constants = values[position], map(jax.lax.stop_gradient, values)
        # Where the cotangent is zero, the product does not depend on the factors: no gradient.
        factors = [jnp.where(ct != 0, *each) for each in zip(values, constants, strict=True)]
        factors[position] = ct
        (result,) = run(*factors)
        is_kept = jnp.isfinite(ct) if every else ct == 0
        return [jnp.where(is_kept & ~jnp.isfinite(result), jnp.zeros_like(result), result)]

    return product


def _keep_zeros_in_contraction(run: Run, position: int, name: str, every: bool) -> Run:
    """Wraps `run`, a contraction of a factor and the cotangent at `position`, to keep zeros. The
    sum omits the products of an element of the factor that is not finite and a zero element of the
    cotangent (with `every`: any element)."""

    def contraction(*values: Any) -> list[Any]:
        ct, factor = values[position], values[1 - position]
        is_bad = ~jnp.isfinite(factor)

        def contract(ct: Any, factor: Any, run: Run = run) -> Any:
            (result,) = run(*([ct, factor] if position == 0 else [factor, ct]))
            return result

        def contract_without_bad(ct: Any, factor: Any) -> Any:
            without_bad = contract(ct, jnp.where(is_bad, 0, factor))
            if every:
                return without_bad
            bad_terms = contract((ct != 0).astype(ct.dtype), is_bad.astype(factor.dtype))
            # The derivatives of the whole sum keep zeros, too, since `where` selects only some of
            # its elements.
            whole = contract(ct, factor, _attach_zero_keeping_gradient(run, name, every))
            return jnp.where(bad_terms != 0, whole, without_bad)

        # Most factors are finite, and the plain contraction takes a third of the time.
        return [jax.lax.cond(jnp.any(is_bad), contract_without_bad, contract, ct, factor)]

    return contraction


def _find_factors(
    graph: Graph, cotangents: Sequence[int], path: Path, others: Callable[[Node], bool]
) -> Iterator[tuple[Occurrence, int | None]]:
    """Finds the nodes to rewrite in a graph that is linear in its inputs at `cotangents`.

    Yields each operation that multiplies a cotangent by a factor, with the position of the
    cotangent among the operation's inputs. Also yields each operation that depends on no cotangent
    and for which `others` is true, with None.
    """
    linear = {graph.inputs[i] for i in cotangents}  # the values that depend on a cotangent
    for node in graph.nodes:
        occurrence = Occurrence(path, node)
        positions = [i for i, v in enumerate(node.inputs) if isinstance(v, Value) and v in linear]
        if positions:
            linear.update(node.outputs)
        if node.primitive is _jax.JIT:
            inner = occurrence.into("jaxpr")
            yield from _find_factors(node.region("jaxpr"), positions, inner, others)
        elif positions:
            if node.op in operations.FACTORS and len(positions) < len(node.operands):
                yield occurrence, positions[0]
        elif others(node):
            yield occurrence, None


def _run_on_values(node: Node) -> Run:
    """Returns a node as a function of its operands without the literals."""

    def run(*values: Any) -> list[Any]:
        rest = iter(values)
        return run_node(
            node, [v.val if isinstance(v, Literal) else next(rest) for v in node.inputs]
        )

    return run


def _drop_literals(node: Node, operands: Sequence[Any]) -> list[Any]:
    return [x for v, x in zip(node.inputs, operands, strict=True) if isinstance(v, Value)]
