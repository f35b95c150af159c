"""Turns recorded entries into one program: to show it, to explain it, and to edit it by rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.importer import graph_of
from tracegrad.ir.running import run_graph
from tracegrad.ir.scopes import UNDER_RULES
from tracegrad.ir.scopes_in_scans import add_scope_in_scans
from tracegrad.rewriting.identities import perturbed
from tracegrad.tape.derivatives import transpose_derivative
from tracegrad.tape.effects import remove_repeated_effects
from tracegrad.tape.record import Entry, type_of_slot
from tracegrad.tape.recorded_rules import RecordedRule, tracing_rule
from tracegrad.tracing.argument_paths import argument_path, derivatives_of_argument
from tracegrad.tracing.in_force import RuleSet, apply_rules_in_force, without_editing
from tracegrad.tracing.misdirected_rules import mark_inputs


def _bind_placeholder(
    rule: RecordedRule, operands: Sequence[Any], results: Sequence[Any]
) -> list[Any]:
    """Binds an operation that stands for a function with a rule; does not trace the function."""
    primitive: Any = jax.extend.core.Primitive(rule.op or rule.name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, name: list(results))
    bound: list[Any] = primitive.bind(*operands, name=rule.name)
    return bound


class RecordedGraph(NamedTuple):
    """Entries as a graph.

    Attributes:
      graph: its inputs are the arrays that are not results of entries.
      inputs: the slots of the graph's inputs.
    """

    graph: Graph
    inputs: list[int]


def graph_of_entries(
    entries: Sequence[Entry],
    types: Sequence[Any] | Mapping[int, Any],
    outputs: Sequence[int],
    first: Sequence[int] = (),
    *,
    runs_rules: bool = True,
) -> RecordedGraph:
    """Returns the graph of entries, without residuals.

    Args:
      entries: in the order in which they ran.
      types: the arrays of the slots, or their types.
      outputs: the slots of the graph's outputs.
      first: the slots of the graph's first inputs, used or not.
      runs_rules: whether functions that ran on values are traced; if not, each function is one
        operation.
    """
    made = {slot for entry in entries for slot in entry.results}
    used = [slot for entry in entries for slot in entry.args]
    inputs = [s for s in dict.fromkeys([*first, *used, *outputs]) if s not in made]

    def tape(*arrays: Any) -> list[Any]:
        values = dict(zip(inputs, arrays, strict=True))
        run_entries(entries, values, None if runs_rules else types)
        return [values[slot] for slot in outputs]

    program = jax.make_jaxpr(tape)(*[type_of_slot(types[slot]) for slot in inputs])
    return RecordedGraph(graph_of(program), inputs)


def run_entries(
    entries: Sequence[Entry],
    values: dict[int, Any],
    types: Sequence[Any] | Mapping[int, Any] | None = None,
    on_use: Callable[[int, Any], Any] = lambda slot, value: value,
) -> None:
    """Runs entries again, to be traced.

    Args:
      entries: in the order in which they ran.
      values: the arrays by slot; the results are added to `values`.
      types: the types of the slots. With types, a function that ran on values does not run again,
        but becomes one operation.
      on_use: ``(slot, array) -> operand``, called in the name scope of each use of the array.
    """
    saved: set[int] = set()  # the slots of residuals, which have no value here
    for entry in entries:
        if not saved.isdisjoint(entry.args):
            raise NotImplementedError(
                "rules (or a gradient_override_map) came into force between the call of a compiled "
                "function on this tape and a second derivative through it: open the tape inside "
                "their block"
            )
        computation = entry.computation
        scope, settings = _jax.equation_context(entry.source_info, None)
        with scope, settings:
            used = {slot: on_use(slot, values[slot]) for slot in entry.args}
            operands = [used[slot] for slot in entry.args]
            if isinstance(computation, RecordedRule) and types is not None:
                result_types = [type_of_slot(types[slot]) for slot in entry.results]
                results = _bind_placeholder(computation, operands, result_types)
            elif isinstance(computation, RecordedRule):
                with tracing_rule(computation.name):
                    results = computation.called(*operands)
            else:
                results = computation.called(*operands)
        results = jax.tree.leaves(results)
        saved.update(entry.results[len(results) :])
        for slot, result in zip(entry.results, results):
            values.setdefault(slot, result)  # slots that count as constants have an array already


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

        run_entries(entries, values, on_use=add_zeros)
        return [add_zeros(slot, values[slot]) for slot in targets]

    slots = [*inputs, *intermediate]
    types = [jax.typeof(arrays[slot]) for slot in slots]
    graph = graph_of(jax.make_jaxpr(tape)(*types))
    if graph.effects:
        graph = remove_repeated_effects(graph)
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
