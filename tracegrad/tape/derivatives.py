"""Differentiates one computation of a tape by JAX: from its operands, or from saved residuals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from tracegrad import _jax
from tracegrad.ir import Graph, Node
from tracegrad.ir.dependence import (
    Masks,
    data_flow,
    dependence,
    joined,
    of_each,
    spread,
    without_unused,
)
from tracegrad.ir.importer import graph_of
from tracegrad.ir.running import run_graph
from tracegrad.rewriting.host_calls import without_past_effects

Fun = Callable[..., list[Any]]
# ``(active, operands, results, cotangents) -> operand cotangents``: `active` has the positions of
# the operands to differentiate, `cotangents` maps positions of results to their cotangents. The
# returned dict maps positions in `active` to cotangents.
PullBack = Callable[
    [tuple[int, ...], Sequence[Any], Sequence[Any], Mapping[int, Any]], dict[int, Any]
]


def pull_back_at_operands(
    fun: Fun, is_whole: bool = False, has_references: bool = False
) -> PullBack:
    """Returns a pull-back by a VJP at the operands. It needs no residuals, but XLA computes a few
    operations again.

    Args:
      fun: the function.
      is_whole: whether every operand counts as connected, as for `jax.checkpoint`.
      has_references: whether `fun` uses a `jax.Ref`; JAX then has no derivative that can be staged.
    """

    def by_vjp(
        active: tuple[int, ...],
        operands: Sequence[Any],
        results: Sequence[Any],
        cotangents: Mapping[int, Any],
    ) -> dict[int, Any]:
        seen: set[int] = set()

        def run(values: list[Any]) -> list[Any]:
            for k, i in enumerate(active):
                values[i] = _jax.with_witness(values[i], k, seen)
            return jax.tree.leaves(fun(*values))

        _, vjp = _jax.vjp_of_some(run, operands, active, list(cotangents))
        found = dict(enumerate(vjp(list(cotangents.values()))))
        return {k: ct for k, ct in found.items() if k in seen}

    if has_references:
        return by_vjp

    def pull_back(
        active: tuple[int, ...],
        operands: Sequence[Any],
        results: Sequence[Any],
        cotangents: Mapping[int, Any],
    ) -> dict[int, Any]:
        try:
            _, derivative = _linearise(fun, operands, active)
        except NotImplementedError:  # an operation of `jax.experimental.hijax` that has only a VJP
            return by_vjp(active, operands, results, cotangents)
        types = [jax.typeof(operands[i]) for i in active]
        return transpose_derivative(derivative, types, cotangents, is_whole)

    return pull_back


def _linearise(fun: Fun, operands: Sequence[Any], active: Sequence[int]) -> tuple[Any, Any]:
    along = _jax.of_some(lambda values: fun(*values), operands, active)
    results, derivative = _jax.linearize(
        lambda *moving: jax.tree.leaves(along(*moving)), *(operands[i] for i in active)
    )
    return results, derivative


def transpose_derivative(
    derivative: Callable[..., Any],
    types: Sequence[Any],
    cotangents: Mapping[int, Any],
    is_whole: bool = False,
) -> dict[int, Any]:
    """Returns the cotangents of the inputs on which an output with a cotangent depends, without the
    inputs for which a custom rule returns None.

    Outputs without a cotangent are left out. If they got zeros instead, custom rules would run for
    the zeros, and an infinite derivative would turn the zeros into NaN.
    """
    types = [t.update(weak_type=False) for t in types]
    flowing, seen = list(cotangents), set[int]()

    def along(*tangents: Any) -> list[Any]:
        outputs = derivative(*(_jax.with_witness(t, k, seen) for k, t in enumerate(tangents)))
        return [outputs[k] for k in flowing]

    program = jax.make_jaxpr(along)(*types)
    open_form, primitives = _jax.opened(program), _jax.program_facts(program).primitives
    calls_host = _jax.calls_host(primitive.name for primitive in primitives)
    if is_whole:
        connected = [True] * len(types)
    else:
        connected = _inputs_that_matter(program)
    if not any(connected):
        return {}
    converted = [
        jax.lax.convert_element_type(ct, aval.dtype)
        for ct, aval in zip(cotangents.values(), program.out_avals, strict=True)
    ]
    if calls_host:
        transpose = _transpose_silently(derivative, flowing, types)
        seen.update(range(len(types)))
    else:  # (To transpose operations on references, JAX needs the function, not its jaxpr.)
        linear = along if open_form.effects else jaxpr_as_fun(program)
        transpose = jax.linear_transpose(linear, *types)
    found = list(transpose(converted))
    return {k: ct for k, ct in enumerate(found) if connected[k] and (is_whole or k in seen)}


def _inputs_that_matter(program: Any) -> list[bool]:
    """Says for each input of a program whether an output depends on it."""
    open_form = _jax.opened(program)
    if open_form.effects or any(_jax.sub_programs(e.params) for e in open_form.eqns):
        reached = joined(dependence(graph_of(program)))
        return [bool(reached >> i & 1) for i in range(len(open_form.invars))]
    live = {v for v in open_form.outvars if not hasattr(v, "val")}
    for equation in reversed(open_form.eqns):
        if not live.isdisjoint(equation.outvars):
            live.update(v for v in equation.invars if not hasattr(v, "val"))
    return [v in live for v in open_form.invars]


def _transpose_silently(
    derivative: Callable[..., Any], flowing: Sequence[int], types: Sequence[Any]
) -> Callable[..., Any]:
    """Transposes the derivative of a recomputed function with prints or host calls.

    To transpose the derivative, JAX runs the operations that do not depend on the tangents. Prints
    among these operations are removed: the transpose repeats them, so they would happen twice.
    """
    saved, tree = jax.tree.flatten(derivative)
    trees: list[Any] = []

    def transpose_saved(saved: Sequence[Any]) -> list[Any]:
        derivative = jax.tree.unflatten(tree, saved)
        transpose = jax.linear_transpose(
            lambda *tangents: [derivative(*tangents)[k] for k in flowing], *types
        )
        residuals, transpose_tree = jax.tree.flatten(transpose)
        trees.append(transpose_tree)
        return residuals

    before = without_past_effects(graph_of(jax.make_jaxpr(transpose_saved)(saved)))
    transpose: Callable[..., Any] = jax.tree.unflatten(trees[-1], run_graph(before, saved))
    return transpose


# ------------------------------------------------------------------------------------- residuals


def add_residuals(
    fun: Fun,
    pull_back_of_fun: PullBack,
    count_without_last_residuals: int,
    active_groups: Sequence[tuple[int, ...]],
    types: Sequence[Any],
    is_whole: bool,
    has_rules: bool,
) -> tuple[Fun, PullBack, int, Any, frozenset[int]]:
    """Returns a forward of `fun`: a function that returns the results of `fun`, then residuals, the
    values that the derivative needs.

    A forward of a forward adds the residuals of the next derivative:

        fun                   x -> sin(x)
        forward of fun        x -> sin(x), cos(x)
        forward of a forward  x -> sin(x), cos(x), cos(x), sin(x)

    The first residual, cos(x), pulls cotangents of sin(x) back. The last residual, sin(x), pulls
    cotangents of the residual cos(x) back. So if a custom rule is not the true derivative, the
    second derivative is the derivative of the rule's computation.

    Args:
      fun: a function, or a forward, whose results end with residuals.
      pull_back_of_fun: the pull-back of `fun`; used if `fun` is a forward.
      count_without_last_residuals: the number of results of `fun` without its last residuals (1
        for the second line above); 0 if `fun` is no forward.
      active_groups: the sets of operands that may be differentiated together, the smallest first;
        the last set has all operands. Residuals are saved for each set: a function with a custom
        rule that does not depend on a set is called, not differentiated.
      types: the types of all operands.
      is_whole: as for `pull_back_at_operands`.
      has_rules: whether `fun` contains a custom rule, which may differ from the true derivative.

    Returns:
      The forward, its pull-back, the number and the tree of the results of `fun`, and the positions
      of the residuals that are constants to a derivative: they depend on the operands only through
      stopped gradients.
    """
    result_tree: Any = None
    derivative_trees: list[Any] = []

    def run(*operands: Any) -> Any:
        nonlocal result_tree
        results = fun(*operands)
        result_tree = jax.tree.structure(results)
        return results

    def saving(*operands: Any) -> list[Any]:
        saved: list[Any] = []
        for active in active_groups:
            results, derivative = _linearise(run, operands, active)
            residuals, tree = jax.tree.flatten(derivative)
            saved += residuals
            derivative_trees.append(tree)
        return [*results, *saved]

    program = jax.make_jaxpr(saving)(*types)
    count = result_tree.num_leaves
    open_form, graph = _jax.opened(program), graph_of(program)
    # The forward does not return residuals that are operands (JAX would copy them), duplicates (a
    # VJP under jit returns an array up to four times) or constants (zeros). If a residual is also a
    # result, the forward returns the value twice, so that a gradient computed from the residual
    # does not count as computed from the result. `residuals` are positions in (operands, constants,
    # results of the forward).
    depends, outs = _depends_on_inputs(graph), open_form.outvars
    fixed = [outs[i] for i in range(count, len(outs)) if not depends[i]]
    constants = without_unused(graph.replace(outputs=fixed), keeps_effects=False)
    places = {id(v): i for i, v in enumerate((*open_form.invars, *constants.outputs))}
    kept = list(range(count))
    for i, v in enumerate(outs[count:], count):
        if id(v) not in places:
            places[id(v)] = len(types) + len(fixed) + len(kept)
            kept.append(i)
    residuals = [places[id(v)] for v in outs[count:]]
    varies = dependence(graph, past_stops=False)
    constant_residuals = frozenset(k for k, i in enumerate(kept) if i >= count and not varies[i])

    def forward(*operands: Any) -> list[Any]:
        results = _jax.eval_program(program, operands)
        return [results[i] for i in kept]

    def pull_back(
        active: tuple[int, ...],
        operands: Sequence[Any],
        results: Sequence[Any],
        cotangents: Mapping[int, Any],
    ) -> dict[int, Any]:
        # Without custom rules, one derivative serves all results: one loop runs, not two.
        first = count_without_last_residuals
        begin = first if has_rules or max(cotangents) < first else 0
        of_previous = {k: ct for k, ct in cotangents.items() if k < begin}
        of_fun = {k: ct for k, ct in cotangents.items() if begin <= k < count}
        of_residuals = {k: ct for k, ct in cotangents.items() if k >= count}
        found: dict[int, Any] = {}
        if of_previous:
            _add_to(found, pull_back_of_fun(active, operands, results, of_previous))
        if of_fun:
            arrays = [*operands, *(constants(*operands) if fixed else ()), *results]
            at_residual = iter(residuals)
            for group, tree in zip(active_groups, derivative_trees, strict=True):
                saved = list(islice(at_residual, tree.num_leaves))
                if set(active) <= set(group):
                    break
            derivative = jax.tree.unflatten(tree, [arrays[i] for i in saved])
            every = transpose_derivative(derivative, [types[i] for i in group], of_fun, is_whole)
            at = {i: k for k, i in enumerate(active)}
            by_operand = {group[k]: ct for k, ct in every.items()}
            _add_to(found, {at[i]: ct for i, ct in by_operand.items() if i in at})
        if of_residuals:  # no residuals were saved for this order: compute the forward again
            pull_forward = pull_back_at_operands(forward)
            _add_to(found, pull_forward(active, operands, results, of_residuals))
        return found

    return forward, pull_back, count, result_tree, constant_residuals


def _depends_on_inputs(graph: Graph) -> list[bool]:
    """Says for each output of a graph whether it depends on an input or an effect."""

    def rule(node: Node, ins: Masks) -> Masks:
        by_effect = int(bool(node.effects)) << len(graph.inputs)
        return [mask | by_effect for mask in data_flow(node, ins)]

    return [bool(mask) for mask in spread(graph, of_each([True] * len(graph.inputs)), rule)]


def _add_to(cotangents: dict[int, Any], more: Mapping[int, Any]) -> None:
    for k, ct in more.items():
        cotangents[k] = jnp.add(cotangents[k], ct) if k in cotangents else ct
