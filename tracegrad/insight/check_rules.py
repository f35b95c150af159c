"""Checks the custom rules of a program, each on its own, at the operands that it receives."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.insight.bounded import bounded
from tracegrad.insight.comparisons import Checked
from tracegrad.insight.explaining.measuring import MeasuredPass
from tracegrad.insight.finite_differences import (
    Estimate,
    Function,
    Limits,
    Numbers,
    Weighed,
    along_smooth,
    beside,
    difference,
    judge,
    random_like,
    status_of,
    weighed,
)
from tracegrad.insight.gradient_flow import RegionFlow, gradient_flow, is_among
from tracegrad.insight.raising import AsItIs, in_double
from tracegrad.ir import (
    CustomGradient,
    Graph,
    Node,
    Occurrence,
    StopGradient,
    Value,
    has_gradient,
    operations,
)
from tracegrad.ir.authors import code_of_rule, is_jaxs_rule
from tracegrad.ir.editing import Op, around_each
from tracegrad.ir.frames import CHANGES_GRADIENT, OF_HOST_CALL
from tracegrad.ir.occurrence import Path, is_own_file, origin_of_function
from tracegrad.ir.running import run_node
from tracegrad.tracing.rule_errors import words_at


def operands_in(program: Graph, leaves: Sequence[Any]) -> dict[Occurrence, list[Any]]:
    """Returns the operands of each custom rule and each `stop_gradient` that runs, and the results
    of each operation of `operations.IMPLICIT`; in a scan they are stacked over the steps. JAX's own
    rules are left out.

    Args:
      program: a program in double precision.
      leaves: the arrays for the inputs of `program`.
    """
    return _Operands(program).given(leaves)


def check_rules(
    program: Graph,
    operands: Mapping[Occurrence, Sequence[Any]],
    declared: Callable[[str], Any],
    limits: Callable[[Graph], Limits],
    random: Any,
) -> Iterator[Checked]:
    """Compares each rule's derivative with finite differences of its function.

    Args:
      program: a program in double precision.
      operands: the result of `operands_in` for the program.
      declared: returns, for the name of a rule's function, whether the rule differs on purpose.
      limits: returns the limits for a graph alone, whatever dtypes the rest of the program has.
      random: a random generator of NumPy.
    """
    flow = gradient_flow(program)
    for rule, given in operands.items():
        if isinstance(rule.node, CustomGradient):
            own = limits(rule.node.primal)
            if code_of_rule(rule.node) in OF_HOST_CALL:  # NumPy's function, of real numbers
                own = replace(own, is_analytic=False)
            yield from _check_rule(rule, given, flow, declared, own, random)


class _Operands(MeasuredPass):
    """The forward pass of `operands_in`."""

    def given(self, leaves: Sequence[Any]) -> dict[Occurrence, list[Any]]:
        """See `operands_in`."""
        with self.collecting() as found:
            self.forward(self.graph, [*leaves, *(v.value for v in self.graph.variables)], ())
        measured = [(*self.keys[number], array) for number, array in found.items()]
        taken = {cond: np.ravel(index) for kind, cond, _, index in measured if kind == "branch"}
        operands: dict[Occurrence, list[Any]] = {}
        for kind, rule, _, operand in measured:
            if rule is not None and kind == "operand" and _has_run(rule.path, taken):
                operands.setdefault(rule, []).append(operand)
        return operands

    def is_measured(self, node: Node) -> bool:
        if isinstance(node, CustomGradient):
            return not is_jaxs_rule(node)
        return isinstance(node, StopGradient) or node.op in operations.IMPLICIT

    def operation(self, here: Occurrence, operands: list[Any]) -> list[Any]:
        results = run_node(here.node, operands)
        # An operand of a sample is a random key, which is no array of numbers.
        kept = results if here.node.op in operations.IMPLICIT else operands
        for i, value in enumerate(kept):
            self.note("operand", here, i, jnp.asarray, value)
        return results


def _has_run(path: Path, taken: Mapping[Occurrence | None, Any]) -> bool:
    """Whether every branch on the path was taken (in a loop, at every step), and every loop ran."""
    for depth, (node, name) in enumerate(path):
        if node.primitive is _jax.SCAN and node.params["length"] == 0:
            return False
        index = taken.get(Occurrence(path[:depth], node))
        if index is not None and not np.all(index == list(node.regions).index(name)):
            return False
    return True


def _check_rule(
    rule: Occurrence,
    stacked: Sequence[Any],
    flow: RegionFlow,
    declared: Callable[[str], Any],
    limits: Limits,
    random: Any,
) -> Iterator[Checked]:
    """Checks a rule by those operands, and for those results, that the program differentiates. A
    rule may refuse other operands, and may ignore cotangents of other results."""
    node = rule.node
    assert isinstance(node, CustomGradient)
    around = flow.along(rule.path)
    wanted = [value in around.arrived for value in node.outputs]
    active = [
        i
        for i, value in enumerate(node.inputs)
        if i >= node.closed_over and is_among(value, around.varying) and has_gradient(value)
    ]
    if not active or not any(wanted):
        return
    # In scans the operands of all steps are stacked along leading axes.
    steps: tuple[int, ...] = ()
    if stacked:
        steps = np.shape(stacked[0])[: np.ndim(stacked[0]) - len(node.inputs[0].aval.shape)]
    first, last = (0,) * len(steps), tuple(n - 1 for n in steps)
    of, function = _function_of(node, around.graph, active, limits.arithmetic)
    for step in dict.fromkeys((first, last)):
        args = in_double(arg[step] for arg in stacked)
        compiled = bounded(function, args)
        drawn = random_like(random, [value.aval for value in node.outputs])
        weights = [w if is_wanted else None for w, is_wanted in zip(drawn, wanted, strict=True)]
        for i in of:
            (direction,) = random_like(random, [args[i]])
            want = along_smooth(compiled, args, i, direction, weights, limits, random)
            along = want.direction, weights, limits.arithmetic
            number, error = _rule_along(node, args, active, i, *along)
            here = compiled, node, args, active, i, along, limits, random
            again = functools.partial(_beside, *here)
            status = judge([want], number, limits, again) if error is None else status_of(error)
            # A rule that raises an error does so in the user's gradient too.
            if status == "wrong" and error is None and (declared(node.name) or _is_meant(node)):
                status = "deliberate"
            if status == "wrong" and error is None:
                # The function may hold `stop_gradient`s and rules of its own, for which the outer
                # rule is not to blame: JAX's derivative of the function is right, too.
                own = _own_derivative(node, args, i, *along)
                if judge([own], number, limits) == "right":
                    want, status = own, "right"
            yield Checked(
                f"{node.name}, input {i}",
                1,
                "rev" if node.kind == "vjp" else "fwd",
                want.value,
                number.value,
                status,
                rule.origin,
                _definition(node),
                "" if error is None else words_at(node, error),
            )


def _function_of(
    node: CustomGradient, region: Graph, active: list[int], arithmetic: AsItIs
) -> tuple[list[int], Callable[[Sequence[Any]], list[Any]]]:
    """Returns the operands by which to check a rule, and the function that the rule is the
    derivative of, as a function of all operands."""
    if code_of_rule(node) not in OF_HOST_CALL:
        return active, lambda given: arithmetic.run_graph(node.primal, given)
    # The operands are those of the host call, its results, and what the gradient closes over.
    for count in range(1, len(node.inputs)):
        results = node.inputs[count : count + len(node.outputs)]
        call = region.producers.get(results[0]) if isinstance(results[0], Value) else None
        if call and call.op in operations.CALLBACKS and list(results) == list(call.outputs):
            break
    else:  # a mapped call is in a loop of its own: only the whole function is checked
        return [], lambda given: []
    return [i for i in active if i < count], lambda given: arithmetic.run_node(call, given[:count])


def _rule_along(
    node: CustomGradient,
    args: Sequence[Any],
    active: Sequence[int],
    i: int,
    direction: Any,
    weights: Sequence[Any],
    arithmetic: AsItIs,
) -> tuple[Weighed, Exception | None]:
    """Returns the derivative along an input as the rule computes it, and the error if it fails.

    All active inputs are differentiated at once, as in the program: a rule may be told which are.
    """
    flowing = [k for k, weight in enumerate(weights) if weight is not None]
    operands = [args[j] for j in active]
    run = _jax.of_some(functools.partial(arithmetic.run_node, node), args, active, flowing)
    try:
        if node.kind == "jvp":
            along = {i: direction}
            tangents = [
                jnp.asarray(along.get(j, jnp.zeros_like(x)), jnp.result_type(x))
                for j, x in zip(active, operands, strict=True)
            ]
            _, outs = _jax.jvp(run, operands, tangents)
            return weighed(outs, [weights[k] for k in flowing]), None
        outs, vjp = _jax.vjp(run, *operands)
        cts = [jnp.asarray(weights[k], out.dtype) for k, out in zip(flowing, outs, strict=True)]
        return weighed([vjp(cts)[active.index(i)]], [direction]), None
    except Exception as error:
        return Weighed(math.nan, 0.0), error


def _beside(
    compiled: Function,
    node: CustomGradient,
    args: Sequence[Any],
    active: Sequence[int],
    i: int,
    along: tuple[Any, Sequence[Any], AsItIs],
    limits: Limits,
    random: Any,
) -> Numbers:
    """Returns the derivatives by differences and by the rule, a few roundings away from `args`."""
    there = beside(args, limits, random)
    want = difference(compiled, there, i, along[0], along[1], limits)
    return [want], _rule_along(node, there, active, i, *along)[0]


def _own_derivative(
    node: CustomGradient,
    args: Sequence[Any],
    i: int,
    direction: Any,
    weights: Sequence[Any],
    arithmetic: AsItIs,
) -> Estimate:
    """Returns JAX's own derivative of a rule's function along an input; NaN if there is none."""
    flowing = [k for k, weight in enumerate(weights) if weight is not None]
    own = functions_of_rules(node.primal, lambda inner: inner.kind == "vjp")

    def along(operand: Any) -> list[Any]:
        outs = arithmetic.run_graph(own, [*args[:i], operand, *args[i + 1 :]])
        return [outs[k] for k in flowing]

    operand = jnp.asarray(args[i])
    try:
        _, outs = _jax.jvp(along, [operand], [jnp.asarray(direction, operand.dtype)])
        value = weighed(outs, [weights[k] for k in flowing]).value
    except Exception:
        value = math.nan
    return Estimate(direction, value, 0.0, True)


def functions_of_rules(program: Graph, chosen: Callable[[CustomGradient], bool]) -> Graph:
    """Replaces the chosen rules of a program by their functions."""

    def is_chosen(found: Occurrence) -> bool:
        return isinstance(found.node, CustomGradient) and chosen(found.node)

    while rules := list(program.find(is_chosen)):
        nodes = {found.node for found in rules}
        outermost = [o for o in rules if not any(node in nodes for node, _ in o.path)]
        program = around_each(program, outermost, _primal).graph
    return program


def _primal(op: Op, *operands: Any) -> list[Any]:
    (node,) = op.nodes
    assert isinstance(node, CustomGradient)
    return node.primal(*operands)


def _is_meant(node: CustomGradient) -> bool:
    """Whether this package inserted a rule in order to change a gradient."""
    codes = _jax.frame_positions(node.source.info)[0]
    ours = itertools.takewhile(lambda code: is_own_file(code.co_filename), codes)
    return any(code in CHANGES_GRADIENT for code in (*ours, code_of_rule(node)))


def _definition(node: CustomGradient) -> str:
    """Returns where the function with the rule is defined: ``model.py:12``."""
    function = origin_of_function(node.primal.function_source)
    return function.place if function else ""
