"""The backward program of a recorded block: what it starts from, and what it is connected to."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad.differentiation.indexed_slices import dense_leaves, is_slices
from tracegrad.differentiation.pull_back import Aggregation, pull_back, running_sum
from tracegrad.ir import Graph, Literal, Value
from tracegrad.ir.dependence import dependence
from tracegrad.ir.occurrence import UNDER_RULES
from tracegrad.lowering import Lowering, evaluate_node
from tracegrad.tape.record import Block, graph_of
from tracegrad.tracing.importer import import_program
from tracegrad.tracing.in_force import apply_in_force, rules_in_force


def trace_backward(
    block: Block,
    sources: Sequence[Any],
    targets: Sequence[Any],
    *,
    stopped: Sequence[Any] = (),
    aggregate: Aggregation = running_sum,
    gated: bool = False,
) -> tuple[Any, tuple[bool, ...]]:
    """Traces the reverse pass over a block.

    Args:
      block: from `block_between` these sources and targets.
      sources, targets: arrays in the block.
      stopped, aggregate, gated: as for `pull_back`; `stopped` are arrays.

    Returns:
      The program ``(*block.arrays, *seeds) -> one cotangent per source``, and for each source
      whether it is connected: whether its cotangent depends on a seed. That is decided on the
      program, never on values; what stands for an unconnected one means nothing.
    """
    graph, values = graph_of(block.operations, block.arrays, block.slots)
    wanted = [values[block.slots[id(source)]] for source in sources]
    outputs = [values[block.slots[id(target)]] for target in targets]
    stops = {values[block.slots[id(array)]] for array in stopped if id(array) in block.slots}
    count = len(block.arrays)

    if rules_in_force():
        return _under_rules(graph, values, wanted, outputs, stops, aggregate, gated)

    def backward(*arrays_and_seeds: Any) -> list[Any]:
        cotangents: dict[Any, list[Any]] = {}
        for value, seed in zip(outputs, arrays_and_seeds[count:], strict=True):
            cotangents.setdefault(value, []).append(seed)
        found = pull_back(
            graph,
            dict(zip(values, arrays_and_seeds[:count], strict=True)),
            cotangents,
            wanted,
            stopped=stops,
            aggregate=aggregate,
            gated=gated,
        )
        return [jnp.zeros(()) if ct is None else ct for ct in found]

    return _traced(backward, values, outputs)


def _traced(
    backward: Callable[..., list[Any]], values: Sequence[Value], outputs: Sequence[Value]
) -> tuple[Any, tuple[bool, ...]]:
    types = [value.aval for value in (*values, *outputs)]
    program = jax.make_jaxpr(backward)(*types)
    seeds = sum(1 << i for i in range(len(values), len(types)))
    masks = dependence(import_program(program))
    return program, tuple(bool(mask & seeds) for mask in masks)


def _under_rules(
    graph: Graph,
    values: Sequence[Value],
    wanted: Sequence[Value],
    outputs: Sequence[Value],
    stops: AbstractSet[Value],
    aggregate: Aggregation,
    gated: bool,
) -> tuple[Any, tuple[bool, ...]]:
    """The same with the rules in force applied to the block. What they put into it has no recorded
    values: the block is computed once more from its inputs, which XLA makes one with the first."""
    slots = {value: slot for slot, value in enumerate(values)}
    given = [slots[value] for value in graph.inputs]
    made = [value for value in (*wanted, *outputs, *stops) if value.producer is not None]
    graph.outputs = list(dict.fromkeys(made))
    edited = apply_in_force(graph)
    now = dict(zip(graph.inputs, edited.inputs, strict=True))
    for old, new in zip(graph.outputs, edited.outputs, strict=True):
        assert isinstance(old, Value)
        assert isinstance(new, Value)
        now[old] = new

    def backward(*arrays_and_seeds: Any) -> list[Any]:
        with jax.named_scope(UNDER_RULES):
            known = {
                value: arrays_and_seeds[slot]
                for value, slot in zip(edited.inputs, given, strict=True)
            }
            known.update(edited.constants)
            for node in edited.nodes:
                operands = [v.value if isinstance(v, Literal) else known[v] for v in node.inputs]
                results = evaluate_node(node, operands, Lowering())
                known.update(zip(node.outputs, results, strict=True))
            cotangents: dict[Value, list[Any]] = {}
            for value, seed in zip(outputs, arrays_and_seeds[len(values) :], strict=True):
                cotangents.setdefault(now[value], []).append(seed)
            found = pull_back(
                edited,
                known,
                cotangents,
                [now[value] for value in wanted],
                stopped={now[value] for value in stops},
                aggregate=aggregate,
                gated=gated,
            )
        return [jnp.zeros(()) if ct is None else ct for ct in found]

    return _traced(backward, values, outputs)


def seeds_for(targets: Sequence[Any], output_gradients: Any) -> list[Any]:
    """The cotangents that a backward pass starts from: the given ones, checked, or ones.

    Raises ValueError for a wrong number or shape, TypeError for a wrong dtype and for a complex
    target without one.
    """
    if output_gradients is None:
        given: list[Any] = [None] * len(targets)
    else:
        given = jax.tree.leaves(dense_leaves(output_gradients), is_leaf=lambda leaf: leaf is None)
    if len(given) != len(targets):
        raise ValueError(
            f"output_gradients has {len(given)} arrays, the target {len(targets)}: give one (or "
            "None) for each"
        )
    return [_seed(target, seed) for target, seed in zip(targets, given, strict=True)]


def _seed(target: Any, seed: Any) -> Any:
    if seed is None:
        if jnp.iscomplexobj(target):
            raise TypeError(
                f"the target is {target.dtype}: say with output_gradients which combination of "
                "real and imaginary part to differentiate"
            )
        return jnp.ones_like(target)
    seed = jnp.asarray(seed)
    if seed.shape != jnp.shape(target):
        raise ValueError(
            f"an output gradient has the shape {seed.shape}, its target {jnp.shape(target)}"
        )
    if seed.dtype != target.dtype:
        raise TypeError(f"an output gradient is {seed.dtype}, its target {target.dtype}")
    return seed


def sum_of_known(terms: Sequence[Any], aggregate: Aggregation = running_sum) -> Any:
    """The sum of the cotangents that are there, some of which may be slices; None if none is."""
    known = [term for term in terms if term is not None]
    if any(map(is_slices, known)):
        return functools.reduce(operator.add, known)
    return aggregate(known) if known else None
