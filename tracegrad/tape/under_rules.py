"""Differentiates recorded entries as one program that rules edit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir.importer import graph_of
from tracegrad.ir.running import run_graph
from tracegrad.ir.scopes import UNDER_RULES
from tracegrad.ir.scopes_in_scans import add_scope_in_scans
from tracegrad.rewriting.host_calls import without_past_effects
from tracegrad.rewriting.identities import perturbed
from tracegrad.tape.derivatives import transpose_derivative
from tracegrad.tape.record import Entry
from tracegrad.tracing.argument_paths import argument_path, derivatives_of_argument
from tracegrad.tracing.in_force import RuleSet, apply_rules_in_force, without_editing
from tracegrad.tracing.misdirected_rules import mark_inputs


def vjp_under_rules(
    path: Sequence[tuple[Entry, tuple[int, ...]]],
    arrays: Sequence[Any],
    sources: Sequence[int],
    targets: Sequence[int],
    stopped: Collection[int],
    rules: Sequence[RuleSet],
    variables: Mapping[int, str],
) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns a function that pulls cotangents of targets back to sources, through a program edited
    by rules.

    Operations that rules insert have no recorded values, so the program computes the entries again;
    XLA merges equal computations. A rule may replace the operation that computes an intermediate
    source, together with later operations, by one operation. So zeros are added to such a source at
    each use, in the scope of the use, and the source's cotangent is the cotangent of the zeros.

    `variables`: see `Record.variable_names`.
    """
    entries = [entry for entry, _ in path]
    made = {slot for entry in entries for slot in entry.results}
    used = [slot for entry in entries for slot in entry.args]
    # Numbers are written into the program, as they are when JAX traces the function.
    numbers = {slot: arrays[slot] for slot in used if not isinstance(arrays[slot], jax.Array)}
    used = [slot for slot in used if slot not in numbers]
    inputs = [
        slot
        for slot in dict.fromkeys([*sources, *used, *targets])
        if slot not in made or slot in stopped
    ]
    intermediate = [slot for slot in dict.fromkeys(sources) if slot not in inputs]

    def tape(*operands: Any) -> list[Any]:
        values = {**numbers, **dict(zip(inputs, operands))}
        zeros = dict(zip(intermediate, operands[len(inputs) :]))

        def add_zeros(slot: int, value: Any) -> Any:
            return perturbed(value, zeros[slot]) if slot in zeros else value

        saved: set[int] = set()  # the slots of residuals, which have no value here
        for entry in entries:
            if not saved.isdisjoint(entry.args):
                raise NotImplementedError(
                    "rules (or a gradient_override_map) came into force between the call of a "
                    "compiled function on this tape and a second derivative through it: open the "
                    "tape inside their block"
                )
            scope, settings = _jax.equation_context(entry.source_info, None)
            with scope, settings:
                used = {slot: add_zeros(slot, values[slot]) for slot in entry.args}
                results = entry.computation.called(*[used[slot] for slot in entry.args])
            results = jax.tree.leaves(results)
            saved.update(entry.results[len(results) :])
            for slot, result in zip(entry.results, results):
                values.setdefault(slot, result)  # a slot that counts as constant has an array
        return [add_zeros(slot, values[slot]) for slot in targets]

    slots = [*inputs, *intermediate]
    types = [jax.typeof(arrays[slot]) for slot in slots]
    graph = graph_of(jax.make_jaxpr(tape)(*types))
    if graph.effects:
        graph = without_past_effects(graph)
    places = {slot: i for i, slot in enumerate(slots)}
    wanted = tuple(dict.fromkeys(places[slot] for slot in sources))
    differentiated = tuple(i in wanted for i in range(len(types)))
    hints = tuple(variables.get(id(arrays[slot])) or argument_path(arrays[slot]) for slot in slots)
    graph = replace(graph, hints=hints, differentiated=differentiated)
    outer = {v: derivatives_of_argument(arrays[slot]) for v, slot in zip(graph.inputs, inputs)}
    for rule_set in rules:
        rule_set.refuse_outer(graph, outer)
    edited = add_scope_in_scans(apply_rules_in_force(graph, rules), UNDER_RULES)

    def run(*operands: Any) -> list[Any]:
        return run_graph(edited, operands)

    run = jax.named_call(run, name=UNDER_RULES)
    all_rules = [rule for rule_set in rules for rule in rule_set.rules]
    operands = [
        *mark_inputs(
            [arrays[slot] for slot in inputs], [(h,) for h in hints], differentiated, all_rules
        ),
        *(jnp.zeros_like(arrays[slot]) for slot in intermediate),
    ]
    flowing = [k for k, slot in enumerate(targets) if _jax.has_gradient(arrays[slot])]

    def backward(seeds: Sequence[Any]) -> list[Any]:
        along = _jax.of_some(lambda values: run(*values), operands, wanted)
        with without_editing():
            _, derivative = _jax.linearize(along, *(operands[i] for i in wanted))
            cts = transpose_derivative(
                derivative, [types[i] for i in wanted], {k: seeds[k] for k in flowing}
            )
        at = {place: k for k, place in enumerate(wanted)}
        return [cts.get(at[places[slot]]) for slot in sources]

    return backward
