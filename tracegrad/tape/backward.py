"""The backward program of a recorded block: what it starts from, and what it is connected to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.connectivity import Walk
from tracegrad.differentiation.gradient_types import as_inexact
from tracegrad.differentiation.indexed_slices import is_slices
from tracegrad.differentiation.pull_back import (
    Aggregation,
    active_inputs,
    linked_inputs,
    node_vjp,
    pull_back,
    reached_from,
    running_sum,
)
from tracegrad.ir import Graph, Node, Value
from tracegrad.ir.scopes import UNDER_RULES
from tracegrad.rewriting.ports import perturbed
from tracegrad.tape.block import Block, graph_of, refuse_saved
from tracegrad.tape.effects import silence
from tracegrad.tape.replay import NOTHING, PullBack, Replay, run_again, with_stand_in
from tracegrad.tracing.in_force import Force, apply_in_force


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
    replay: Replay = NOTHING,
    rules: Sequence[Force] = (),
) -> Traced:
    """Traces the reverse pass over a block.

    Args:
      block: from `block_between`.
      stopped, aggregate, gated: as for `pull_back`; `stopped` are slots of the block.
      replay: what runs again, if the cotangents may be differentiated. In the place of the arrays
        of its slots stand-ins are given (see `with_stand_in`).
      rules: what is applied to the block; called where none are in force.
    """
    graph, values, saving = graph_of(block.operations, block.types, as_called=bool(rules))
    places = {value: slot for slot, value in values.items()}
    zeros: list[Value] = []
    if rules:
        refuse_saved(block.operations)
        graph, given, zeros, wanted, outputs = _under_rules(rules, graph, values, block, stopped)
        places, stops, again = given, set[Value](), graph.nodes
    else:
        again = tuple([graph.nodes[i] for i in replay.operations])
        wanted = [values[slot] for slot in block.sources]
        outputs = [values[slot] for slot in block.targets]
        stops = {values[slot] for slot in stopped}
    as_called = {graph.nodes[i] for i in replay.as_called}
    stand_ins = {values[slot]: slot for slot in replay.slots}
    deciding = {node: saved.deciding for node, saved in saving.items()}
    walk = Walk()
    reached = reached_from(graph, wanted, walk, stops, deciding)
    count = len(block.types)
    # Which results of a node have cotangents: what runs again is differentiated with respect to
    # those alone, and before anything is pulled back. So it is traced twice.
    given_to: dict[Node, list[int]] = {}

    def backward(*arrays_and_seeds: Any) -> list[Any]:
        known: dict[Value, Any] = dict(graph.constants)
        known.update((value, arrays_and_seeds[slot]) for value, slot in places.items())
        known.update((value, _zeros(value.aval)) for value in zeros)
        pull: dict[Node, tuple[Node, PullBack]] = {}

        def through(
            node: Node, known: Mapping[Value, Any], cts: Sequence[Any], active: Sequence[int]
        ) -> list[Any]:
            if node in pull:
                called, pulled = pull[node]
                found = pulled([ct for ct in cts if ct is not None])
                linked = linked_inputs(walk, called, cts[: len(called.outputs)], active)
                return [ct if is_linked else None for ct, is_linked in zip(found, linked)]
            given_to[node] = [i for i, ct in enumerate(cts) if ct is not None]
            saved = saving.get(node)
            if saved is None:
                return node_vjp(walk, node, known, cts, active)
            return saved.pull_back(walk, node, known, cts, active, as_called=node in as_called)

        for node in again:
            called, at = saving[node].as_called(node, known) if node in as_called else (node, known)
            silence(called)
            given = given_to.get(node, ())
            results, pulled = run_again(called, at, active_inputs(node, reached), given)
            if node in given_to and (called is not node or node not in saving):
                pull[node] = called, pulled
            for value, result in zip(node.outputs, results):
                if value in stand_ins:
                    known[value] = with_stand_in(result, arrays_and_seeds[stand_ins[value]])
                else:
                    known.setdefault(value, result)
        cotangents: dict[Value, list[Any]] = {}
        for value, seed in zip(outputs, arrays_and_seeds[count:], strict=True):
            cotangents.setdefault(value, []).append(seed)
        return pull_back(
            graph,
            known,
            cotangents,
            wanted,
            reached,
            through,
            stopped=stops,
            aggregate=aggregate,
            gated=gated,
        )

    run = jax.named_call(backward, name=UNDER_RULES) if rules else backward
    types = [*block.types, *(block.types[slot] for slot in block.targets)]
    if again:
        jax.eval_shape(run, *types)
    return _traced(run, types, count)


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


class _Edited(NamedTuple):
    """A block under rules.

    Attributes:
      graph: what the rules have made of it.
      given: the slots of those of its inputs that are arrays of the block.
      zeros: its other inputs, which are zero.
      wanted, outputs: what stands for the sources and the targets.
    """

    graph: Graph
    given: dict[Value, int]
    zeros: list[Value]
    wanted: list[Value]
    outputs: list[Any]


def _under_rules(
    rules: Sequence[Force],
    graph: Graph,
    values: Mapping[int, Value],
    block: Block,
    stopped: Collection[int],
) -> _Edited:
    """The graph with rules in force applied to it.

    What rules put into it has no recorded values: the block is computed once more from its inputs,
    which XLA makes one with the first. A rule may put a source that was computed in the block, or
    what counts as constant there, inside of one operation with what is computed from it. So the
    cotangent of the one is that of an input that is added to it, and the other is itself an input.
    """
    given = [slot for slot, value in values.items() if value.producer is None]
    assert [values[slot] for slot in given] == list(graph.inputs)
    now: dict[int, Any] = dict(values)
    for slot in set(stopped).difference(given):
        now[slot] = graph.add_input(block.types[slot])
        graph.replace_uses(values[slot], now[slot])
        given.append(slot)
    added = [slot for slot in dict.fromkeys(block.sources) if slot not in given]
    for slot in added:
        value, zero = now[slot], graph.add_input(block.types[slot])
        for user in dict.fromkeys(value.users):  # where that is: what matches may hold some of them
            (new,) = graph.insert(perturbed, [value, zero], before=user)
            graph.replace_uses(value, new, {user}.__contains__)
        if slot in block.targets:
            (now[slot],) = graph.insert(perturbed, [value, zero])
    graph.add_outputs([now[slot] for slot in block.targets])
    graph.differentiated = (*(slot in block.sources for slot in given), *[True] * len(added))
    edited = apply_in_force(graph, rules)
    inputs = dict(zip((*given, *added), edited.inputs, strict=True))
    return _Edited(
        edited,
        {inputs[slot]: slot for slot in given},
        [inputs[slot] for slot in added],
        [inputs[slot] for slot in block.sources],
        list(edited.outputs),
    )


def _zeros(aval: Any) -> Any:
    return _jax.varying_as(jnp.zeros(aval.shape, aval.dtype), aval)


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
    aval = jax.typeof(target)
    if is_slices(seed):
        seed = seed.dense_as(aval)
    seed = jnp.asarray(as_inexact(seed, aval.dtype))
    if seed.shape != jnp.shape(target):
        raise ValueError(
            f"an output gradient has the shape {seed.shape}, its target {jnp.shape(target)}"
        )
    if seed.dtype != target.dtype:
        raise TypeError(f"an output gradient is {seed.dtype}, its target {target.dtype}")
    return seed
