"""The custom rules of a program, each checked on its own at the values that flow to it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.insight.comparisons import Checked
from tracegrad.insight.explaining.measuring import MeasuredPass
from tracegrad.insight.finite_differences import (
    Estimate,
    Limits,
    along_smooth,
    judge,
    random_like,
    weighed,
)
from tracegrad.ir import (
    CustomGradient,
    Graph,
    Node,
    Occurrence,
    StopGradient,
    Value,
    operations,
)
from tracegrad.ir.authors import code_of_rule, is_jaxs_rule
from tracegrad.ir.dependence import mask_of, spread_below
from tracegrad.ir.frames import CHANGES_GRADIENT, OF_HOST_CALL
from tracegrad.ir.occurrence import Path, is_own_file, origin_of_function
from tracegrad.ir.running import run_graph, run_node
from tracegrad.tracing.rule_errors import words_at


def operands_in(program: Graph, leaves: Sequence[Any]) -> dict[Occurrence, list[Any]]:
    """What each custom rule and each `stop_gradient` that runs is given; in a scan stacked over the
    steps. JAX's own rules are left out.

    Args:
      program: a program in double precision.
      leaves: the arrays of its inputs.
    """
    return _Operands(program).given(leaves)


def check_rules(
    program: Graph,
    operands: Mapping[Occurrence, Sequence[Any]],
    declared: Callable[[str], Any],
    limits: Limits,
    random: Any,
) -> Iterator[Checked]:
    """Compares each rule's derivative with finite differences of its function.

    Args:
      program, operands: of and as of `operands_in`.
      declared: of the name of a rule's function, whether it is meant to differ.
      limits: for the differences.
      random: of NumPy.
    """
    flows = spread_below(program, [1] * len(program.inputs))
    for rule, given in operands.items():
        if isinstance(rule.node, CustomGradient):
            yield from _check_rule(rule, given, flows, declared, limits, random)


class _Operands(MeasuredPass):
    """A forward pass that keeps what each custom rule and each `stop_gradient` is given."""

    def __init__(self, program: Graph):
        super().__init__(program, [True] * len(program.inputs), close=False)

    def given(self, leaves: Sequence[Any]) -> dict[Occurrence, list[Any]]:
        """See `operands_in`."""
        with self._collecting() as found:
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
        return isinstance(node, StopGradient)

    def operation(self, here: Occurrence, operands: list[Any]) -> list[Any]:
        for i, operand in enumerate(operands):
            self.note("operand", here, i, jnp.asarray, operand)
        return run_node(here.node, operands)


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
    flows: Mapping[Value, int],
    declared: Callable[[str], Any],
    limits: Limits,
    random: Any,
    active: list[int] | None = None,
) -> Iterator[Checked]:
    """`flows`: the values that depend on a leaf; `active`: the operands by which the rule is
    checked, default: all."""
    node = rule.node
    assert isinstance(node, CustomGradient)
    if active is None:
        active = [i for i, v in enumerate(node.inputs) if i >= node.closed_over and v.has_gradient]
    # In scans the operands of all steps are stacked along leading axes.
    steps: tuple[int, ...] = ()
    if stacked:
        steps = np.shape(stacked[0])[: np.ndim(stacked[0]) - len(node.inputs[0].aval.shape)]
    first, last = (0,) * len(steps), tuple(n - 1 for n in steps)
    of, function = _function_of(node, active)
    compiled = jax.jit(function)
    for step in dict.fromkeys((first, last)):
        args = [arg[step] for arg in stacked]
        weights = random_like(random, [value.aval for value in node.outputs])
        for i in of:
            (direction,) = random_like(random, [args[i]])
            want = along_smooth(compiled, args, i, direction, weights, limits, random)
            number, note = _rule_along(node, args, active, i, want.direction, weights)
            varying = [k for k in active if mask_of(node.inputs[k], flows)] if note else active
            if varying != active:  # it may refuse what is a constant here, as those of equinox do
                yield from _check_rule(rule, stacked, flows, declared, limits, random, varying)
                return
            status = "wrong" if note else judge([want], number, limits)
            if status == "wrong" and (declared(node.name) or _is_meant(node)):
                status = "deliberate"
            if status == "wrong" and not note:
                # What the function stops on the way is as little a matter of the rule as what the
                # rules inside of it give.
                own = _own_derivative(node, args, i, want.direction, weights)
                if judge([own], number, limits) == "right":
                    want, status = own, "right"
            yield Checked(
                f"{node.name}, input {i}",
                1,
                "rev" if node.kind == "vjp" else "fwd",
                want.value,
                number,
                status,
                rule.origin,
                _definition(node),
                note,
            )


def _function_of(
    node: CustomGradient, active: list[int]
) -> tuple[list[int], Callable[[Sequence[Any]], list[Any]]]:
    """What a rule is the derivative of, as a function of all of its operands, and by which of those
    that have a gradient."""
    if code_of_rule(node) not in OF_HOST_CALL:
        return active, lambda given: run_graph(node.primal, given)
    # Its operands are those of the call, the results, and what the gradient closes over.
    for count in range(1, len(node.inputs)):
        results = node.inputs[count : count + len(node.outputs)]
        call = results[0].producer if isinstance(results[0], Value) else None
        if call and call.op in operations.CALLBACKS and list(results) == list(call.outputs):
            break
    else:  # a mapped call is in a loop of its own; then there is the check of the whole function
        return [], lambda given: []
    return [i for i in active if i < count], lambda given: run_node(call, given[:count])


def _rule_along(
    node: CustomGradient,
    args: Sequence[Any],
    active: Sequence[int],
    i: int,
    direction: Any,
    weights: Sequence[Any],
) -> tuple[float, str]:
    """What a rule gives for the derivative along an input, while all that can vary does, as a rule
    may be told; and why, if it gives none."""
    flowing = [k for k, weight in enumerate(weights) if weight is not None]
    operands = [args[j] for j in active]
    run = _jax.of_some(functools.partial(run_node, node), args, active, flowing)
    try:
        if node.kind == "jvp":
            along = {i: direction}
            tangents = [
                jnp.asarray(along.get(j, jnp.zeros_like(x)), jnp.result_type(x))
                for j, x in zip(active, operands, strict=True)
            ]
            _, outs = _jax.jvp(run, operands, tangents)
            return weighed(outs, [weights[k] for k in flowing]), ""
        outs, vjp = _jax.vjp(run, *operands)
        cts = [jnp.asarray(weights[k], out.dtype) for k, out in zip(flowing, outs, strict=True)]
        return weighed([vjp(cts)[active.index(i)]], [direction]), ""
    except Exception as error:
        return math.nan, words_at(node, error)


def _own_derivative(
    node: CustomGradient, args: Sequence[Any], i: int, direction: Any, weights: Sequence[Any]
) -> Estimate:
    """What JAX has for the derivative of a rule's function along an input; none is NaN."""
    flowing = [k for k, weight in enumerate(weights) if weight is not None]
    own = without_rules(node.primal, lambda inner: inner.kind == "vjp")

    def along(operand: Any) -> list[Any]:
        outs = run_graph(own, [*args[:i], operand, *args[i + 1 :]])
        return [outs[k] for k in flowing]

    operand = jnp.asarray(args[i])
    try:
        _, outs = _jax.jvp(along, [operand], [jnp.asarray(direction, operand.dtype)])
        value = weighed(outs, [weights[k] for k in flowing])
    except Exception:
        value = math.nan
    return Estimate(direction, value, 0.0, True)


def without_rules(program: Graph, chosen: Callable[[CustomGradient], bool]) -> Graph:
    """A program with chosen rules replaced by their functions."""
    program = program.copy()

    def is_chosen(found: Occurrence) -> bool:
        return isinstance(found.node, CustomGradient) and chosen(found.node)

    while rules := list(program.find(is_chosen)):
        around = {found.node for found in rules}
        for found in rules:
            if not any(node in around for node, _ in found.path):
                here = program.own(found)
                assert isinstance(here.node, CustomGradient)
                here.graph.replace(here.node, here.node.primal)
    return program


def _is_meant(node: CustomGradient) -> bool:
    """Whether this package has put a rule in to change a gradient."""
    codes = [] if node.source is None else _jax.frame_positions(node.source.info)[0]
    ours = itertools.takewhile(lambda code: is_own_file(code.co_filename), codes)
    return any(code in CHANGES_GRADIENT for code in (*ours, code_of_rule(node)))


def _definition(node: CustomGradient) -> str:
    """Where the function with the rule is: ``model.py:12``."""
    function = origin_of_function(node.primal.function_source)
    return function.place if function else ""
