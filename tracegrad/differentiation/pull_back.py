"""The reverse pass: cotangents of a graph's outputs → cotangents of any of its values.

It asks JAX for each node's VJP, at the values that the node had, and has no derivative formula of
its own. Nothing is computed forward again but what a node's VJP itself needs, and that XLA drops
where it is not used.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.differentiation.indexed_slices import is_slices
from tracegrad.ir import (
    CustomGradient,
    Graph,
    Node,
    Occurrence,
    Recompute,
    RegionNode,
    Value,
    has_gradient,
)
from tracegrad.ir.dependence import Masks, joined, spread
from tracegrad.ir.importer import graph_of
from tracegrad.ir.notes import add_note
from tracegrad.ir.occurrence import users_line
from tracegrad.ir.operations import CONNECTING
from tracegrad.ir.running import read, run_node
from tracegrad.tracing.user_errors import explain_loop, explain_rule

# Adds up the cotangents that reach one value on several ways; given at least one.
Aggregation = Callable[[Sequence[Any]], Any]
# The cotangents of some inputs of a node (by position), from what its values were and the
# cotangents of its results; None for an input or a result that has none.
NodeVJP = Callable[[Node, Mapping[Value, Any], Sequence[Any], Sequence[int]], list[Any]]


def running_sum(terms: Sequence[Any]) -> Any:
    """One term after the other."""
    return functools.reduce(jnp.add, terms)


def tree_sum(terms: Sequence[Any]) -> Any:
    """Pairwise: terms are freed early, and rounding grows with the logarithm of their number."""
    while len(terms) > 1:
        pairs = [running_sum(terms[i : i + 2]) for i in range(0, len(terms), 2)]
        terms = pairs
    return terms[0]


def sum_of_known(terms: Sequence[Any], aggregate: Aggregation = running_sum) -> Any:
    """The sum of the cotangents that are there, some of which may be slices; None if none is."""
    known = [term for term in terms if term is not None]
    if len(known) == 1:
        return known[0]
    if any(map(is_slices, known)):
        return functools.reduce(operator.add, known)
    return aggregate(known) if known else None


def pull_back(
    graph: Graph,
    values: Mapping[Value, Any],
    cotangents: Mapping[Value, Sequence[Any]],
    wanted: Sequence[Value],
    reached: AbstractSet[Value],
    through: NodeVJP,
    *,
    stopped: AbstractSet[Value] = frozenset(),
    aggregate: Aggregation = running_sum,
    gated: bool = False,
) -> list[Any]:
    """Pulls cotangents back through a graph.

    Args:
      graph: its nodes are taken in reverse order, each once.
      values: what each value of the graph was; the results of nodes may be left out where no VJP
        needs them.
      cotangents: of any values of the graph, each of its value's shape and dtype; those of one
        value are added up.
      wanted: the values whose cotangents are asked for.
      reached: the values on the ways to these, from `reached_from`.
      through: how cotangents are pulled back through one node: `node_vjp`, or by way of it.
      stopped: values that count as constants: what they were computed from gets nothing by them.
      aggregate: how the cotangents of one value are added up.
      gated: release the cotangents of a node's inputs together, when all of them are there.

    Returns:
      For each wanted value its cotangent, or None if nothing connects it to a value that has one.
    """
    found = {value: list(terms) for value, terms in cotangents.items()}
    for node in reversed(graph.nodes):
        given = [None if v in stopped else _total(found, v, aggregate) for v in node.outputs]
        active = active_inputs(node, reached)
        if not active or all(ct is None for ct in given):
            continue
        results = through(node, values, given, active)
        if gated:
            results = _released_together(results)
        for i, ct in zip(active, results, strict=True):
            value = node.inputs[i]
            assert isinstance(value, Value)
            if ct is not None:
                found.setdefault(value, []).append(ct)
    # What has arrived at a value in the middle stays there, though its producer took it too.
    return [_total(found, value, aggregate) for value in wanted]


def _total(found: dict[Value, list[Any]], value: Value, aggregate: Aggregation) -> Any:
    """The cotangent of a value whose users are all done; None if it has none."""
    terms = found.get(value)
    if not terms:
        return None
    if len(terms) > 1:
        found[value] = terms = [aggregate(terms)]
    return terms[0]


def reached_from(
    graph: Graph,
    wanted: Sequence[Value],
    walk: Walk,
    stopped: AbstractSet[Value] = frozenset(),
    deciding: Mapping[Node, int] = MappingProxyType({}),
) -> AbstractSet[Value]:
    """The values through which a gradient may come back to a wanted one.

    Of a node's results those alone that are connected to a reached operand: JAX fails at some
    operations (a linear solve) where only the others vary, though nothing arrives by these.

    `deciding`: of how many of its first results a node says itself to what they are connected, when
    cotangents are pulled back through it.
    """
    start = {value for value in wanted if has_gradient(value)}

    def rule(node: Node, ins: Masks) -> Masks:
        whole = len(node.outputs) if _is_whole(node) else deciding.get(node, 0)
        found: Masks = [any(ins)] * whole
        if whole < len(node.outputs):
            found += walk.links(node, [i for i, mask in enumerate(ins) if mask])[whole:]
        pairs = zip(node.outputs, found, strict=True)
        return [v in start or (v not in stopped and mask != 0) for v, mask in pairs]

    masks: dict[Value, int] = {}
    spread(graph, [value in start for value in graph.inputs], rule, masks)
    return {value for value, mask in masks.items() if mask and has_gradient(value)}


def active_inputs(node: Node, reached: Collection[Value]) -> list[int]:
    """The inputs of a node that get a cotangent from it."""
    # What a custom rule closes over comes first, and gets nothing from the rule.
    first = node.closed_over if isinstance(node, CustomGradient) else 0
    inputs = list(enumerate(node.inputs))[first:]
    return [i for i, v in inputs if isinstance(v, Value) and v in reached]


def node_vjp(
    walk: Walk,
    node: Node,
    values: Mapping[Value, Any],
    cotangents: Sequence[Any],
    active: Sequence[int],
) -> list[Any]:
    """The cotangents of the active inputs of a node, as JAX's VJP of it has them.

    None for one that is zero whatever the cotangents are (``floor``): carried on as an array of
    zeros it would become NaN at the first infinite derivative on its way, where there is nothing.
    """
    linked = linked_inputs(walk, node, cotangents, active)
    if not any(linked):
        return [None] * len(active)
    # A rule may look at what varies beside the operands that get something from it.
    is_all = all(linked) or _asks_what_varies(node)
    chosen = active if is_all else list(itertools.compress(active, linked))
    found = dict(zip(chosen, _jax_vjp(node, values, cotangents, chosen), strict=True))
    return [found[i] if is_linked else None for i, is_linked in zip(active, linked, strict=True)]


def _asks_what_varies(node: Node) -> bool:
    if not isinstance(node, RegionNode):
        return False
    asks = node.params.get("symbolic_zeros") or _jax.facts_below(node.params).asks_what_varies
    return bool(asks)


def linked_inputs(
    walk: Walk, node: Node, cotangents: Sequence[Any], active: Sequence[int]
) -> list[bool]:
    """Whether the cotangents of the active inputs of a node depend on one that is given."""
    if _is_whole(node):
        return [True] * len(active)
    rows = zip(walk.links(node, active), cotangents, strict=True)
    linked = joined(row for row, ct in rows if ct is not None)
    return [bool(linked >> i & 1) for i in active]


def _is_whole(node: Node) -> bool:
    """Whether each result of a node is connected to each operand without a look at the two."""
    # TensorFlow differentiates a recomputed function as a whole: an argument that it does not use
    # has a gradient of zero, not none.
    return node.op in CONNECTING or isinstance(node, Recompute)


def _jax_vjp(
    node: Node, values: Mapping[Value, Any], cotangents: Sequence[Any], active: Sequence[int]
) -> list[Any]:
    # Results without a cotangent are left out, not given zeros: a rule on the way to such a result
    # alone is then not called. It may return a gradient whatever its cotangent is.
    given = [i for i, ct in enumerate(cotangents) if ct is not None]
    run = functools.partial(run_node, node)
    try:
        _, vjp = _jax.vjp_of_some(run, read(node.inputs, values), active, given)
        return list(vjp([cotangents[i] for i in given]))
    except Exception as error:
        types = [atom.aval for atom in node.inputs]
        one = functools.partial(_jax.program_of_one, node.primitive, node.params, types)
        explain_node(error, node, lambda: graph_of(one()))
        raise


def explain_node(error: Exception, node: Node, program: Callable[[], Graph]) -> None:
    """Adds to JAX's error at the derivative of a node what the node is, and the cure.

    `program`: gives the node as a graph.
    """
    explain_loop(error, users_line(node))
    explain_rule(error, program)
    # The innermost node only, and once: the one that runs names itself as well.
    if not any(note.startswith("while ") for note in getattr(error, "__notes__", ())):
        add_note(error, f"while differentiating {Occurrence((), node)}")


def _released_together(cotangents: Sequence[Any]) -> list[Any]:
    barrier: Callable[[list[Any]], list[Any]] = jax.lax.optimization_barrier
    return barrier(list(cotangents))
