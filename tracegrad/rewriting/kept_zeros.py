"""Keeps NaN and Inf out of gradients where a derivative is not finite and nothing depends on it.

A backward pass multiplies cotangents by factors (by ``0.5 / sqrt(x)``), and zero times infinity is
NaN. So an operation gets a rule whose backward is JAX's own, as a graph in which a selection stands
behind each product of a cotangent and a factor: where the cotangent is zero, the product is zero.
The rule's backward is treated in the same way when it is differentiated in its turn.
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
from tracegrad.ir.importer import import_program
from tracegrad.ir.occurrence import Occurrence, Path
from tracegrad.ir.running import run_graph, run_node
from tracegrad.rewriting.overriding import with_gradient

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
        first = node.closed_over  # what the function closes over has no gradient
        own = [v for i, v in enumerate(node.inputs) if isinstance(v, Value) and i >= first]
        return node.kind == "jvp" and _has_factors(node, [v.aval for v in node.operands], len(own))
    if not isinstance(node, Apply) or node.op not in operations.BY_ELEMENT - operations.BOUNDED:
        return False
    return has_gradient(node.outputs[0]) and _is_nonlinear(node)


# Whether the derivative of an operation has factors that are no constants. To ask it of the
# operations of twelve layers takes 3 ms with it and 180 ms without.
_nonlinear: Cache[Any, bool] = Cache(1024)


def _is_nonlinear(node: Node) -> bool:
    dtypes = tuple(value.aval.dtype for value in node.inputs)
    literals = tuple(None if isinstance(v, Value) else str(v.val) for v in node.inputs)
    key = node.primitive, str(dict(node.params)), dtypes, literals
    known = _nonlinear.get(key)
    if known is None:  # of one element it says the same as of many
        scalars = [_jax.struct((), dtype_of(value)) for value in node.operands]
        known = _has_factors(node, scalars, len(scalars))
        _nonlinear.put(key, known)
    return known


def _has_factors(node: Node, avals: Sequence[Any], count: int) -> bool:
    """Whether the backward of a node multiplies cotangents by what is no constant; `count`: how
    many of its operands, the last ones, are differentiated."""
    first = len(avals) - count
    active = [i for i in range(first, len(avals)) if _jax.has_gradient(avals[i])]
    if not active:
        return False
    try:
        graph = _backward(_of_values(node), avals, active)
    except Exception:  # it has no derivative, and JAX will say so
        return False
    along = range(len(avals), len(graph.inputs))
    return any(_factors(graph, along, (), lambda node: False))


# ------------------------------------------------------------------------------------- in a graph


def keeping_zeros(every: bool) -> Callable[..., list[Any]]:
    """What stands for a match that is concerned, as ``function(op, *operands)``: of the same values
    and forward mode. `every`: whether any finite cotangent stays finite, not only zero zero."""

    def kept(op: Op, *operands: Any) -> list[Any]:
        (node,) = op.nodes
        return _with_rule(_of_values(node), node.name, every)(*_values(node, operands))

    return kept


def keeps_zeros(node: CustomGradient) -> bool:
    """Whether a custom gradient stands in the place of an operation, of which it has the name."""
    return file_of_primal(node) == __file__


def _with_rule(run: Run, name: str, every: bool) -> Run:
    """A function whose backward is JAX's own, but keeps zeros."""

    def primal(*operands: Any) -> list[Any]:
        return run(*operands)

    def gradient(op: Any, *dys: Any, active: Sequence[int]) -> list[Any]:
        active = [i for i in active if _jax.has_gradient(op.inputs[i])]
        given = [dy for dy, out in zip(dys, op.outputs, strict=True) if _jax.has_gradient(out)]
        backward = _kept(_backward(run, list(map(jax.typeof, op.inputs)), active), given, every)
        found: list[Any] = [None] * len(op.inputs)
        for i, ct in zip(active, run_graph(backward, [*op.inputs, *given]), strict=True):
            found[i] = ct
        return found

    primal.__name__ = primal.__qualname__ = name
    return with_gradient(primal, gradient, {}, name, None, is_told=True)


def _backward(run: Run, avals: Sequence[Any], active: Sequence[int]) -> Graph:
    """The backward of a function as a graph: of the operands and the cotangents of its float
    results, to the cotangents of the operands at the positions `active`."""
    outs = jax.eval_shape(run, *avals)
    flowing = [j for j, out in enumerate(outs) if _jax.has_gradient(out)]

    def pull(operands: list[Any], cotangents: list[Any]) -> Any:
        _, back = _jax.vjp_of_some(lambda xs: run(*xs), operands, active, flowing)
        return back(cotangents)

    graph = import_program(jax.make_jaxpr(pull)(list(avals), [outs[j] for j in flowing]))
    # The results are computed already, and what that printed is printed.
    return without_unused(graph, keeps_effects=False)


def _kept(graph: Graph, cotangents: Sequence[Any], every: bool) -> Graph:
    """A graph whose last inputs are cotangents, in which the products of these keep zeros."""
    count = len(graph.inputs)
    found = dict(_factors(graph, range(count - len(cotangents), count), (), _is_concerned))

    def kept(op: Op, *operands: Any) -> list[Any]:
        (node,) = op.nodes
        run, position = _of_values(node), found[op.match]
        if position is not None:
            run = _product(run, position, every)
        return _with_rule(run, node.name, every)(*_values(node, operands))

    return around_each(graph, list(found), kept, depends_on=found.__getitem__).graph


def _product(run: Run, position: int, every: bool) -> Run:
    """A product of a cotangent, at this position, and a factor; zero where the cotangent is."""

    def product(*values: Any) -> list[Any]:
        ct, fixed = values[position], map(jax.lax.stop_gradient, values)
        # Of a cotangent that is zero the product is zero however the factor changes.
        factors = [jnp.where(ct != 0, *each) for each in zip(values, fixed, strict=True)]
        factors[position] = ct
        (result,) = run(*factors)
        kept = jnp.isfinite(ct) if every else ct == 0
        return [jnp.where(kept & ~jnp.isfinite(result), jnp.zeros_like(result), result)]

    return product


def _factors(
    graph: Graph, cotangents: Sequence[int], path: Path, others: Callable[[Node], bool]
) -> Iterator[tuple[Occurrence, int | None]]:
    """What is to keep zeros in a graph that is linear in its cotangents (by position): operations
    that multiply one of them by a factor, with its position; and of the `others` that are wanted,
    which make factors, with None."""
    depends = {graph.inputs[i] for i in cotangents}
    for node in graph.nodes:
        found = Occurrence(path, node)
        along = [i for i, v in enumerate(node.inputs) if isinstance(v, Value) and v in depends]
        if along:
            depends.update(node.outputs)
        if node.primitive is _jax.JIT:
            yield from _factors(node.region("jaxpr"), along, found.into("jaxpr"), others)
        elif along:
            if node.op in operations.FACTORS and len(along) < len(node.operands):
                yield found, along[0]
        elif others(node):
            yield found, None


def _of_values(node: Node) -> Run:
    """A node as a function of those of its operands that are no literals."""

    def run(*values: Any) -> list[Any]:
        rest = iter(values)
        return run_node(
            node, [v.val if isinstance(v, Literal) else next(rest) for v in node.inputs]
        )

    return run


def _values(node: Node, operands: Sequence[Any]) -> list[Any]:
    return [x for v, x in zip(node.inputs, operands, strict=True) if isinstance(v, Value)]
