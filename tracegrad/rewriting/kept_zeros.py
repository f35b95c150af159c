"""Keeps NaN and Inf out of gradients where a derivative is not finite and nothing depends on it.

The transpose of what JAX's own derivative does to a tangent (``0.5 / sqrt(x) * t``) multiplies a
cotangent by the same factor, and zero times infinity is NaN. So an operation gets a
`jax.custom_jvp` whose rule is JAX's derivative, in which each operation on tangents with a factor
that is no constant has a transpose of its own: JAX's, but for what it makes of zeros. All
operations in the rule and in that transpose are treated likewise when they are differentiated in
their turn, to any order.
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
from tracegrad.ir.editing import Op, around_each
from tracegrad.ir.importer import import_program
from tracegrad.ir.occurrence import Occurrence, Path
from tracegrad.ir.running import run_graph, run_node
from tracegrad.rewriting.overriding import with_tangents

# Of values and tangents the results and their tangents, or the other way round.
Run = Callable[..., list[Any]]


# ------------------------------------------------------------------------------ which are concerned


def may_make_nan(found: Occurrence) -> bool:
    """Whether the derivative at a node may be NaN or Inf where its operands are numbers or not: of
    an operation element by element, or of a rule of kind jvp that is made of such.

    What is inside of a custom gradient or of a solve is no node that is differentiated.
    """
    return found.rule_around is None and _is_concerned(found.node)


def _is_concerned(node: Node) -> bool:
    if isinstance(node, CustomGradient):
        return node.kind == "jvp" and _rule_has_factors(node)
    return _is_by_element(node) and node.op not in operations.BOUNDED and _is_nonlinear(node)


def _is_by_element(node: Node) -> bool:
    if not isinstance(node, Apply) or node.op not in operations.BY_ELEMENT:
        return False
    (result,) = node.outputs
    values = node.operands
    return has_gradient(result) and any(has_gradient(value) for value in values)


# Whether the derivative of an operation has factors that are no constants. To ask it of the
# operations of twelve layers takes 3 ms with it and 180 ms without.
_nonlinear: Cache[Any, bool] = Cache(1024)


def _is_nonlinear(node: Node) -> bool:
    dtypes = tuple(value.aval.dtype for value in node.inputs)
    literals = tuple(None if isinstance(v, Value) else str(v.val) for v in node.inputs)
    key = node.primitive, str(dict(node.params)), dtypes, literals
    known = _nonlinear.get(key)
    if known is None:
        given = node.operands
        active = [i for i, value in enumerate(given) if has_gradient(value)]
        try:  # of one element it says the same as of many
            scalars = [_jax.struct((), dtype_of(value)) for value in given]
            graph = _with_tangents(_of_values(node), scalars, active)
        except Exception:  # it has no derivative, and JAX will say so
            known = False
        else:
            known = _has_factors(graph, range(len(given), len(graph.inputs)))
        _nonlinear.put(key, known)
    return known


def _has_factors(graph: Graph, tangents: Sequence[int]) -> bool:
    for node, along in _along(graph, tangents):
        if node.primitive is _jax.JIT:
            if _has_factors(node.region("jaxpr"), along):
                return True
        elif _has_factor(node, along):
            return True
    return False


def _has_factor(node: Node, along: Sequence[int]) -> bool:
    """Whether an operation that is linear in some operands multiplies them by others."""
    if node.op not in operations.FACTORS or not along or not _is_by_element(node):
        return False
    return any(isinstance(v, Value) and i not in along for i, v in enumerate(node.inputs))


def _along(graph: Graph, tangents: Sequence[int]) -> Iterator[tuple[Node, list[int]]]:
    """Every node with the positions of those operands that depend on some inputs."""
    depends = {graph.inputs[i] for i in tangents}
    for node in graph.nodes:
        along = [i for i, v in enumerate(node.inputs) if isinstance(v, Value) and v in depends]
        if along:
            depends.update(node.outputs)
        yield node, along


def _rule_has_factors(node: CustomGradient) -> bool:
    """Whether the derivative by a rule of kind jvp has factors that are no constants: by the
    operands that it is given, which come after those that the function closes over."""
    given = [(i, value) for i, value in enumerate(node.inputs) if isinstance(value, Value)]
    first = node.closed_over
    active = [k for k, (i, value) in enumerate(given) if i >= first and has_gradient(value)]
    try:
        graph = _with_tangents(_of_values(node), [value.aval for _, value in given], active)
    except Exception:  # it has no derivative, and that is said where somebody wants it
        return False
    return _has_factors(graph, range(len(given), len(graph.inputs)))


# ------------------------------------------------------------------------------------- in a graph


def keeping_zeros(every: bool) -> Callable[..., list[Any]]:
    """What stands for a match that is concerned, as ``function(op, *operands)``: of the same values
    and tangents. `every`: whether any finite cotangent stays finite, and not only zeros zeros."""

    def kept(op: Op, *operands: Any) -> list[Any]:
        (node,) = op.nodes
        return _keep_zeros(node, operands, every)

    return kept


def _keep_zeros(
    node: Node,
    operands: Sequence[Any],
    every: bool,
    primal: Run | None = None,
    in_rule: bool = False,
) -> list[Any]:
    """The results of a node that is concerned.

    Args:
      primal: what gives the values, if it is not the node itself.
      in_rule: whether the graph is the derivative of such a node.
    """
    run = _of_values(node)

    def derivative(primals: Sequence[Any], *along: Any) -> tuple[list[Any], list[Any]]:
        outs, tangents = _derivative(run, every, primals, *along)
        return _jax.keeping_rule(function, primals, outs), tangents

    function = with_tangents(primal or run, node.name, derivative)
    pairs = zip(node.inputs, operands, strict=True)
    values = [operand for atom, operand in pairs if isinstance(atom, Value)]
    results = _jax.keeping_rule(function, values) if in_rule else function(*values)
    return list(results)


def keeps_zeros(node: CustomGradient) -> bool:
    """Whether a custom gradient stands in the place of an operation, of which it has the name."""
    return file_of_primal(node) == __file__


def _kept(graph: Graph, tangents: Sequence[int], every: bool) -> Graph:
    """A graph that is linear in its tangents, in which their cotangents keep zeros."""
    linear = dict(_to_keep(graph, tangents, ()))

    def kept(op: Op, *operands: Any) -> list[Any]:
        (node,) = op.nodes
        along = linear[op.match]
        if along is None:
            return _keep_zeros(node, operands, every, in_rule=True)
        return _keep_zeros(node, operands, every, _keeping(node, along, every))

    return around_each(graph, list(linear), kept, depends_on=linear.__getitem__).graph


def _to_keep(
    graph: Graph, tangents: Sequence[int], path: Path
) -> Iterator[tuple[Occurrence, int | None]]:
    """What is to keep zeros in a graph that is linear in its tangents: operations that multiply one
    of them by a factor, with its position; and what makes factors, with None."""
    for node, along in _along(graph, tangents):
        found = Occurrence(path, node)
        if node.primitive is _jax.JIT:
            yield from _to_keep(node.region("jaxpr"), along, found.into("jaxpr"))
        elif _has_factor(node, along):
            (linear,) = along
            yield found, linear
        elif not along and _is_concerned(node):
            yield found, None


# -------------------------------------------------------------------------------------- one by one


def _of_values(node: Node) -> Run:
    """A node as a function of those of its operands that are no literals."""
    places = [i for i, value in enumerate(node.inputs) if isinstance(value, Value)]
    literals = [value.val if isinstance(value, Literal) else None for value in node.inputs]

    def run(*values: Any) -> list[Any]:
        operands = list(literals)
        for i, value in zip(places, values, strict=True):
            operands[i] = value
        return run_node(node, operands)

    return run


def _with_tangents(run: Run, avals: Sequence[Any], active: Sequence[int]) -> Graph:
    """The program of the results of a function and of their tangents; its inputs are the operands,
    and the tangents of some of them."""

    def both(operands: Sequence[Any], tangents: Sequence[Any]) -> Any:
        places = [operands[i] for i in active]
        return _jax.jvp(_jax.of_some(lambda xs: run(*xs), operands, active), places, list(tangents))

    return import_program(jax.make_jaxpr(both)(list(avals), [avals[i] for i in active]))


def _derivative(
    run: Run, every: bool, primals: Sequence[Any], active: Sequence[int], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """JAX's own derivative, in which the transpose of each operation with a factor keeps zeros."""
    graph = _with_tangents(run, list(map(jax.typeof, primals)), active)
    kept = _kept(graph, range(len(primals), len(graph.inputs)), every)
    outs = run_graph(kept, [*primals, *tangents])
    return outs[: len(outs) // 2], outs[len(outs) // 2 :]


def _keeping(node: Node, linear: int, every: bool) -> Run:
    """An operation that multiplies an operand by a factor, as a function of both: its transpose
    keeps zeros.

    `linear`: the position of the operand.
    """
    run = _of_values(node)
    is_first = all(isinstance(value, Literal) for value in node.inputs[:linear])

    def product(x: Any, factor: Any) -> Any:
        (result,) = run(x, factor) if is_first else run(factor, x)
        return result

    def back(cotangent: Any, factor: Any) -> Any:
        """What JAX's transpose gives for the operand."""
        (given,) = jax.linear_transpose(lambda x: product(x, factor), cotangent)(cotangent)
        return given

    def is_lost(cotangent: Any, given: Any) -> Any:
        kept = jnp.isfinite(cotangent) if every else cotangent == 0
        return kept & ~jnp.isfinite(given)

    def transpose(cotangent: Any, factor: Any) -> Any:
        given = back(cotangent, factor)
        lost = is_lost(cotangent, given)
        if jnp.shape(factor) != jnp.shape(cotangent):
            # XLA divides by one element for many in its own way.
            return jnp.where(lost, 0, given)
        # Another factor, and not another product: XLA goes on to fuse that with what it is added
        # to, and rounds as it did.
        return back(cotangent, jnp.where(lost, operations.FACTORS[node.op], factor))

    def tangent(primals: Any, tangents: Any) -> Any:
        types = [jax.typeof(primals[0])] * 2
        kept = _kept(import_program(jax.make_jaxpr(back)(*types)), (), every)

        def selected(cotangent: Any, factor: Any) -> Any:
            # Of a cotangent that is zero the product is zero however the factor changes.
            factor = jnp.where(cotangent != 0, factor, jax.lax.stop_gradient(factor))
            (given,) = run_graph(kept, [cotangent, factor])
            lost = is_lost(cotangent, back(cotangent, factor))
            return jnp.where(lost, jnp.zeros_like(given), given)

        return _jax.jvp(selected, primals, tangents)[1]

    of_cotangent = _jax.with_tangent(transpose, tangent)

    def keeping(*values: Any) -> list[Any]:
        operand, factor = values if is_first else reversed(values)
        # JAX's operations take a number, or an axis of length 1, for an array filled with it.
        operand = jnp.broadcast_to(operand, node.outputs[0].aval.shape)
        return [_jax.linear_by_element(product, of_cotangent, operand, factor)]

    return keeping
