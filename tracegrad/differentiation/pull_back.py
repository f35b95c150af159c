"""The reverse pass of a graph, node by node: cotangents of its outputs → cotangents of its values.

`explain` measures gradients by this pass; tapes pull cotangents back entry by entry. JAX supplies
each node's VJP, at the values of the node's operands; no derivative formula is written here. A
node's forward pass runs again inside its VJP; XLA drops the unused parts.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

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

# Adds up the cotangents (at least one) that one value gets from its different uses.
Aggregation = Callable[[Sequence[Any]], Any]


def running_sum(terms: Sequence[Any]) -> Any:
    return functools.reduce(jnp.add, terms)


def tree_sum(terms: Sequence[Any]) -> Any:
    """Adds terms pairwise: terms are freed early, and the rounding error grows with the logarithm
    of their number."""
    while len(terms) > 1:
        pairs = [running_sum(terms[i : i + 2]) for i in range(0, len(terms), 2)]
        terms = pairs
    return terms[0]


def sum_present(terms: Sequence[Any], aggregate: Aggregation = running_sum) -> Any:
    """Adds the terms that are not None (arrays or slices); returns None if all are None."""
    present = [term for term in terms if term is not None]
    if len(present) == 1:
        return present[0]
    if any(map(is_slices, present)):
        return functools.reduce(operator.add, present)
    return aggregate(present) if present else None


def pull_back(
    graph: Graph,
    cotangents: Mapping[Value, Sequence[Any]],
    wanted: Sequence[Value],
    reached: AbstractSet[Value],
    through: Callable[[Node, Sequence[Any], Sequence[int]], list[Any]],
) -> list[Any]:
    """Pulls cotangents back through a graph, node by node in reverse order.

    Args:
      cotangents: for any values of the graph, cotangents of the value's shape and dtype; several
        cotangents of one value are added up.
      wanted: the values whose cotangents are returned; None for a value that no value with a
        cotangent depends on.
      reached: the values on the paths to the wanted values, from `reached_from`.
      through: takes a node, the cotangents of its results, and the positions of some inputs;
        returns the cotangents of these inputs. None stands for no cotangent.
    """
    terms_of = {value: list(terms) for value, terms in cotangents.items()}

    def total(value: Value) -> Any:
        terms = terms_of.get(value)
        if not terms:
            return None
        if len(terms) > 1:
            terms_of[value] = terms = [running_sum(terms)]
        return terms[0]

    for node in reversed(graph.nodes):
        result_cts = [total(v) for v in node.outputs]
        active = active_inputs(node, reached)
        if not active or all(ct is None for ct in result_cts):
            continue
        for i, ct in zip(active, through(node, result_cts, active), strict=True):
            value = node.inputs[i]
            assert isinstance(value, Value)
            if ct is not None:
                terms_of.setdefault(value, []).append(ct)
    # The cotangent of an intermediate value stays in `terms_of` after its producer has used it.
    return [total(value) for value in wanted]


def reached_from(graph: Graph, wanted: Sequence[Value], walk: Walk) -> AbstractSet[Value]:
    """Returns the values through which a gradient may come back to a wanted value.

    A node's result is included only if it is connected to a reached operand. JAX fails at some
    operations (a linear solve) if only the unconnected results vary, although no gradient arrives
    through them.
    """
    start = {value for value in wanted if has_gradient(value)}

    def rule(node: Node, ins: Masks) -> Masks:
        if _counts_as_connected(node):
            links: Masks = [any(ins)] * len(node.outputs)
        else:
            links = walk.links(node, [i for i, mask in enumerate(ins) if mask])
        return [v in start or mask != 0 for v, mask in zip(node.outputs, links, strict=True)]

    masks: dict[Value, int] = {}
    spread(graph, [value in start for value in graph.inputs], rule, masks)
    return {value for value, mask in masks.items() if mask and has_gradient(value)}


def active_inputs(node: Node, reached: Collection[Value]) -> list[int]:
    # The closed-over values of a custom rule come first, and get no cotangent from the rule.
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
    """Returns the cotangents of the active inputs of a node, from JAX's VJP of the node.

    A cotangent that is zero for all cotangents of the results (``floor``) is None: an array of
    zeros would become NaN at the first infinite derivative on its way.
    """
    linked = linked_inputs(walk, node, cotangents, active)
    if not any(linked):
        return [None] * len(active)
    # A custom rule may ask which operands vary, and so needs all of them to be active.
    is_all = all(linked) or _rules_see_active(node)
    chosen = active if is_all else list(itertools.compress(active, linked))
    cts = dict(zip(chosen, _jax_vjp(node, values, cotangents, chosen), strict=True))
    return [cts[i] if is_linked else None for i, is_linked in zip(active, linked, strict=True)]


def _rules_see_active(node: Node) -> bool:
    if not isinstance(node, RegionNode):
        return False
    asks = node.params.get("symbolic_zeros") or _jax.facts_below(node.params).rules_see_active
    return bool(asks)


def linked_inputs(
    walk: Walk, node: Node, cotangents: Sequence[Any], active: Sequence[int]
) -> list[bool]:
    """For each active input, whether its cotangent depends on a cotangent that is not None."""
    if _counts_as_connected(node):
        return [True] * len(active)
    rows = zip(walk.links(node, active), cotangents, strict=True)
    linked = joined(row for row, ct in rows if ct is not None)
    return [bool(linked >> i & 1) for i in active]


def _counts_as_connected(node: Node) -> bool:
    """Whether all results count as connected to all operands, without asking JAX."""
    # TensorFlow differentiates a recomputed function as a whole: an unused argument has a gradient
    # of zero, and not None.
    return node.op in CONNECTING or isinstance(node, Recompute)


def _jax_vjp(
    node: Node, values: Mapping[Value, Any], cotangents: Sequence[Any], active: Sequence[int]
) -> list[Any]:
    # Results without a cotangent are omitted, instead of getting zeros. Then a custom rule that
    # only such results depend on is not called; the rule could return a gradient even for zeros.
    flowing = [i for i, ct in enumerate(cotangents) if ct is not None]
    operands = read(node.inputs, values)
    try:
        run = functools.partial(run_node, node)
        _, vjp = _jax.vjp_of_some(run, operands, active, flowing)
        return list(vjp([cotangents[i] for i in flowing]))
    except Exception as error:
        types = [atom.aval for atom in node.inputs]
        program = functools.partial(_jax.program_of_one, node.primitive, node.params, types)
        explain_node(error, node, lambda: graph_of(program()))
        raise


def explain_node(error: Exception, node: Node, program: Callable[[], Graph]) -> None:
    """Adds notes to JAX's error at the derivative of a node: the node, its line, and the cure.
    `program` returns the node as a graph."""
    explain_loop(error, users_line(node))
    explain_rule(error, program)
    # Only the innermost node is named: the note may exist already.
    if not any(note.startswith("while ") for note in getattr(error, "__notes__", ())):
        add_note(error, f"while differentiating {Occurrence((), node)}")
