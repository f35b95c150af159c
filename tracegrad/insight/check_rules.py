"""Checks the custom rules of a program, each on its own, at the operands that it receives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.insight.comparing import Comparison
from tracegrad.insight.comparisons import Checked
from tracegrad.insight.deliberate import Declared, is_meant, is_sample
from tracegrad.insight.finite_differences import Limits
from tracegrad.insight.gradient_flow import RegionFlow, gradient_flow, is_among
from tracegrad.insight.raising import Arithmetic, in_double
from tracegrad.ir import CustomGradient, Graph, Occurrence, has_gradient
from tracegrad.ir.authors import code_of_rule, is_jaxs_rule
from tracegrad.ir.borders import why_not_widened
from tracegrad.ir.editing import Op, around_each, by_match
from tracegrad.ir.frames import OF_HOST_CALL
from tracegrad.ir.occurrence import origin_of_function
from tracegrad.tracing.rule_errors import words_at

Run = Callable[[Sequence[Any]], Any]

_SAMPLES = "differences do not tell the implicit derivative of samples of a gamma distribution"


def operands_in(
    program: Graph, leaves: Sequence[Any], arithmetic: Arithmetic
) -> dict[Occurrence, list[Any]]:
    """Returns the operands of each custom rule that runs; in a scan they are stacked over the
    steps. JAX's own rules are left out, and so are rules in a `while` loop or a `shard_map`, whose
    inner values cannot be led out.

    Args:
      leaves: the arrays for the inputs of `program`.
      arithmetic: runs the program.
    """

    def is_shown(found: Occurrence) -> bool:
        node, around = found.node, [node for node, _ in found.path]
        is_rule = isinstance(node, CustomGradient) and not is_jaxs_rule(node)
        return is_rule and not any(map(why_not_widened, around))

    def show(op: Op, *operands: Any) -> list[Any]:
        for array in (jnp.ones(()), *operands):  # a branch that is not taken shows zeros
            op.show(array)
        return op.results(*operands)

    rules = program.find(is_shown)
    edited = around_each(program, rules, show)
    values = (variable.value for variable in program.variables)
    outs = arithmetic.run_graph(edited.graph, [*leaves, *values])[len(program.outputs) :]
    found = zip(rules, by_match(rules, edited.outs, list(map(jnp.asarray, outs))), strict=True)
    return {rule: arrays for rule, (ran, *arrays) in found if ran.size and ran.all()}


def check_rules(
    program: Graph,
    operands: Mapping[Occurrence, Sequence[Any]],
    declared: Declared,
    limits: Callable[[], Limits],
    random: Any,
) -> Iterator[Checked]:
    """Compares each rule's derivative with finite differences of its function.

    Args:
      program: a program in double precision.
      operands: the result of `operands_in` for the program.
      declared: returns, for the name of a rule's function, whether the rule differs on purpose.
      limits: returns the limits for one rule, whatever dtypes the rest of the program has.
      random: a random generator of NumPy.
    """
    flow = gradient_flow(program)
    for rule, given in operands.items():
        yield from _check_rule(rule, given, flow, declared, limits(), random)


def _check_rule(
    rule: Occurrence,
    stacked: Sequence[Any],
    flow: RegionFlow,
    declared: Declared,
    limits: Limits,
    random: Any,
) -> Iterator[Checked]:
    """Checks a rule by the operands and for the results that the program differentiates. A rule may
    refuse other operands, and may ignore cotangents of other results."""
    node = rule.node
    assert isinstance(node, CustomGradient)
    around = flow.along(rule.path)
    wanted = [value in around.arrived for value in node.outputs]
    active = [
        i
        for i, value in enumerate(node.inputs)
        if i >= node.closed_over and is_among(value, around.varying) and has_gradient(value)
    ]
    if not active or not any(wanted) or is_host_call(rule):
        return
    exact = functools.partial(limits.arithmetic.run_graph, node.primal)
    of_rule = functools.partial(limits.arithmetic.run_node, node)
    flowing = [k for k, is_wanted in enumerate(wanted) if is_wanted]
    names = [f"{node.name}, input {i}" for i in active]
    mode = "rev" if node.kind == "vjp" else "fwd"
    function = origin_of_function(node.primal.function_source)
    for args in _at_steps(node, stacked):
        sides = [_of_list(run, args, active, flowing) for run in (exact, of_rule)]
        leaves = [args[i] for i in active]
        comparison = Comparison(sides[0], sides[1], leaves, names, limits, random)
        for check in comparison.checks([mode], words=functools.partial(words_at, node)):
            # A rule that raises an error does so in the user's gradient too.
            if check.status == "wrong" and not check.note:
                if is_meant(node, declared):
                    check = dataclasses.replace(check, status="deliberate")
                elif _has_varying_sample(node.primal, active):
                    check = dataclasses.replace(check, status="not judged", note=_SAMPLES)
            yield dataclasses.replace(
                check, origin=rule.origin, defined=function.place if function else ""
            )


def _has_varying_sample(graph: Graph, active: Sequence[int]) -> bool:
    """Whether a graph draws samples with a parameter that varies with an active input."""
    flow = gradient_flow(graph, active)
    samples = graph.find(is_sample)
    return any(is_among(o.node.inputs[1], flow.along(o.path).varying) for o in samples)


def is_host_call(rule: Occurrence) -> bool:
    """Whether a node is the rule of a `numpy_function`. (It is checked with the whole function.)"""
    return isinstance(rule.node, CustomGradient) and code_of_rule(rule.node) in OF_HOST_CALL


def _at_steps(node: CustomGradient, stacked: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields the operands of a rule at the first and the last step. In scans the operands of all
    steps are stacked along leading axes."""
    steps = np.shape(stacked[0])[: np.ndim(stacked[0]) - len(node.inputs[0].aval.shape)]
    for step in dict.fromkeys([(0,) * len(steps), tuple(n - 1 for n in steps)]):
        yield in_double(arg[step] for arg in stacked)


def _of_list(run: Run, args: list[Any], active: list[int], wanted: list[int]) -> Run:
    """Returns a function of all operands as one of a list of the active operands."""
    of_active = _jax.of_some(run, args, active, wanted)
    return lambda leaves: of_active(*leaves)
