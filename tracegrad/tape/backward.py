"""The backward program of a recorded block: what it starts from, and what it is connected to."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.indexed_slices import is_slices
from tracegrad.differentiation.pull_back import Aggregation, node_vjp, pull_back, running_sum
from tracegrad.ir import Graph, Literal, Node, Value
from tracegrad.ir.scopes import UNDER_RULES
from tracegrad.lowering import Lowering, evaluate_node
from tracegrad.tape.record import Block, graph_of, refuse_saved
from tracegrad.tracing.in_force import apply_in_force, rules_in_force


class Traced(NamedTuple):
    """The reverse pass over a block.

    Attributes:
      program: ``(*arrays, *seeds) -> one cotangent per source``.
      connected: for each source, whether `pull_back` found a cotangent for it; what stands in the
        place of one that it did not find means nothing.
      needed: for each array, whether the program computes anything of it.
    """

    program: Any
    connected: tuple[bool, ...]
    needed: tuple[bool, ...]


def trace_backward(
    block: Block,
    *,
    stopped: Collection[int] = (),
    aggregate: Aggregation = running_sum,
    gated: bool = False,
) -> Traced:
    """Traces the reverse pass over a block.

    Args:
      block: from `block_between`.
      stopped, aggregate, gated: as for `pull_back`; `stopped` are slots of the block.
    """
    rules = rules_in_force()
    graph, values, saving = graph_of(block.operations, block.types, as_called=bool(rules))
    wanted = [values[slot] for slot in block.sources]
    outputs = [values[slot] for slot in block.targets]
    stops = {values[slot] for slot in stopped}
    types = [*block.types, *(block.types[slot] for slot in block.targets)]
    count = len(block.types)
    if rules:
        refuse_saved(block.operations)
        backward = _under_rules(graph, values, wanted, outputs, stops, aggregate, gated, count)
        return _traced(backward, types, count)

    def through(
        node: Node, known: Mapping[Value, Any], given: Sequence[Any], active: Sequence[int]
    ) -> list[Any]:
        saved = saving.get(node)
        if saved is None:
            return node_vjp(node, known, given, active)
        return saved.pull_back(node, known, given, active)

    def plain_backward(*arrays_and_seeds: Any) -> list[Any]:
        cotangents: dict[Any, list[Any]] = {}
        for value, seed in zip(outputs, arrays_and_seeds[count:], strict=True):
            cotangents.setdefault(value, []).append(seed)
        return pull_back(
            graph,
            {value: arrays_and_seeds[slot] for slot, value in values.items()},
            cotangents,
            wanted,
            stopped=stops,
            aggregate=aggregate,
            gated=gated,
            through=through,
        )

    return _traced(plain_backward, types, count)


def _traced(backward: Callable[..., list[Any]], types: Sequence[Any], count: int) -> Traced:
    connected: list[bool] = []

    def arrays(*arrays_and_seeds: Any) -> list[Any]:
        found = backward(*arrays_and_seeds)
        connected[:] = [ct is not None for ct in found]
        return [jnp.zeros(()) if ct is None else ct for ct in found]

    program = jax.make_jaxpr(arrays)(*types)
    return Traced(program, tuple(connected), _needed(program)[:count])


def _needed(program: Any) -> tuple[bool, ...]:
    """For each input of a program, whether an operation whose results are used takes it.

    Most of what is computed on the way forward is used by no derivative, and what a derivative is
    computed of, JAX may compute once more without use.
    """
    open_form = _jax.opened(program)
    live = {id(atom) for atom in open_form.outvars}
    for equation in reversed(open_form.eqns):
        if equation.effects or not live.isdisjoint(map(id, equation.outvars)):
            live.update(map(id, equation.invars))
    return tuple(id(variable) in live for variable in open_form.invars)


def _under_rules(
    graph: Graph,
    values: Mapping[int, Value],
    wanted: Sequence[Value],
    outputs: Sequence[Value],
    stops: AbstractSet[Value],
    aggregate: Aggregation,
    gated: bool,
    count: int,
) -> Callable[..., list[Any]]:
    """The same with the rules in force applied to the block. What they put into it has no recorded
    values: the block is computed once more from its inputs, which XLA makes one with the first."""
    slots = {value: slot for slot, value in values.items()}
    given = [slots[value] for value in graph.inputs]
    made = [value for value in (*wanted, *outputs, *stops) if value.producer is not None]
    for value in dict.fromkeys(made):
        graph.add_output(value)
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
            for value, seed in zip(outputs, arrays_and_seeds[count:], strict=True):
                cotangents.setdefault(now[value], []).append(seed)
            return pull_back(
                edited,
                known,
                cotangents,
                [now[value] for value in wanted],
                stopped={now[value] for value in stops},
                aggregate=aggregate,
                gated=gated,
            )

    return backward


def seeds_for(targets: Sequence[Any], output_gradients: Any) -> list[Any]:
    """The cotangents that a backward pass starts from: the given ones, checked; None for ones.

    Raises ValueError for a wrong number or shape, TypeError for a wrong dtype and for a complex
    target without one.
    """
    given: list[Any] = [None] * len(targets)
    if output_gradients is not None:
        given = jax.tree.leaves(
            output_gradients, is_leaf=lambda leaf: leaf is None or is_slices(leaf)
        )
    if len(given) != len(targets):
        raise ValueError(
            f"output_gradients has {len(given)} arrays, the target {len(targets)}: give one (or "
            "None) for each"
        )
    return [_seed(target, seed) for target, seed in zip(targets, given, strict=True)]


def _seed(target: Any, seed: Any) -> Any:
    if seed is None:
        if getattr(getattr(target, "dtype", None), "kind", "") == "c":
            raise TypeError(
                f"the target is {target.dtype}: say with output_gradients which combination of "
                "real and imaginary part to differentiate"
            )
        return None
    seed = seed.dense_as(jax.typeof(target)) if is_slices(seed) else jnp.asarray(seed)
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
    if len(known) == 1:
        return known[0]
    if any(map(is_slices, known)):
        return functools.reduce(operator.add, known)
    return aggregate(known) if known else None
