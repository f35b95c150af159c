"""The custom rules of a program, each checked on its own at the values that flow to it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """What each custom rule and each `stop_gradient` that runs is given, and what each of
    `operations.IMPLICIT` gives; in a scan stacked over the steps. JAX's own rules are left out.

    Args:
      program: a program in double precision.
      leaves: the arrays of its inputs.
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
      program, operands: of and as of `operands_in`.
      declared: of the name of a rule's function, whether it is meant to differ.
      limits: of a graph those for it alone, whatever the rest of the program is computed in.
      random: of NumPy.
    """
    flow = gradient_flow(program)
    for rule, given in operands.items():
        if isinstance(rule.node, CustomGradient):
            own = limits(rule.node.primal)
            yield from _check_rule(rule, given, flow, declared, own, random)


class _Operands(MeasuredPass):
    """The forward pass of `operands_in`."""

    def __init__(self, program: Graph):
        super().__init__(program, close=False)

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
        # One of the operands of a sample is a key, which is no array of numbers.
        kept = results if here.node.op in operations.IMPLICIT else operands
        for i, value in enumerate(kept):
            self.note("operand", here, i, jnp.asarray, value)
        return results


def _has_run(path: Path, taken: Mapping[Occurrence | None, Any]) -> bool:
    """Whether every branch on the way was taken (in a loop: at every step), and every loop ran."""
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
    """By the operands, and of the results, that the program differentiates: a rule may refuse what
    is a constant there, and give zeros for what nothing comes back from."""
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
            if status == "wrong" and (declared(node.name) or _is_meant(node)):
                status = "deliberate"
            if status == "wrong" and error is None:
                # What the function stops on the way is as little a matter of the rule as what the
                # rules inside of it give.
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
    """What a rule is the derivative of, as a function of all of its operands, and by which of those
    that have a gradient."""
    if code_of_rule(node) not in OF_HOST_CALL:
        return active, lambda given: arithmetic.run_graph(node.primal, given)
    # Its operands are those of the call, the results, and what the gradient closes over.
    for count in range(1, len(node.inputs)):
        results = node.inputs[count : count + len(node.outputs)]
        call = region.producers.get(results[0]) if isinstance(results[0], Value) else None
        if call and call.op in operations.CALLBACKS and list(results) == list(call.outputs):
            break
    else:  # a mapped call is in a loop of its own; then there is the check of the whole function
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
    """What a rule gives for the derivative along an input, while all that can vary does, as a rule
    may be told; and why, if it gives none."""
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
    """What differences and a rule give along an input, beside these operands."""
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
    """What JAX has for the derivative of a rule's function along an input; none is NaN."""
    flowing = [k for k, weight in enumerate(weights) if weight is not None]
    own = without_rules(node.primal, lambda inner: inner.kind == "vjp")

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


def without_rules(program: Graph, chosen: Callable[[CustomGradient], bool]) -> Graph:
    """A program with chosen rules replaced by their functions."""

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
    """Whether this package has put a rule in to change a gradient."""
    codes = _jax.frame_positions(node.source.info)[0]
    ours = itertools.takewhile(lambda code: is_own_file(code.co_filename), codes)
    return any(code in CHANGES_GRADIENT for code in (*ours, code_of_rule(node)))


def _definition(node: CustomGradient) -> str:
    """Where the function with the rule is: ``model.py:12``."""
    function = origin_of_function(node.primal.function_source)
    return function.place if function else ""
