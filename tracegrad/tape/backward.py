"""The backward program of a recorded block: what it starts from, and what it is connected to."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad.differentiation.indexed_slices import dense_leaves, is_slices
from tracegrad.differentiation.pull_back import Aggregation, pull_back, running_sum
from tracegrad.ir.dependence import dependence
from tracegrad.tape.record import Block, graph_of
from tracegrad.tracing.importer import import_program


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

    types = [jax.typeof(array) for array in (*block.arrays, *targets)]
    program = jax.make_jaxpr(backward)(*types)
    seeds = sum(1 << i for i in range(count, len(types)))
    masks = dependence(import_program(program))
    return program, tuple(bool(mask & seeds) for mask in masks)


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
