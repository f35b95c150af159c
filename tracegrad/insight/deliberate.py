"""What `check_grads` leaves out, as differences cannot judge it: deliberate rules, `stop_gradient`s
that are declared as deliberate, and the algorithm that draws samples of a gamma distribution."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir import CustomGradient, Graph, Occurrence, StopGradient, operations
from tracegrad.ir.authors import author_of, code_of_rule, is_jaxs_rule
from tracegrad.ir.editing import Op, around_each
from tracegrad.ir.frames import CHANGES_GRADIENT
from tracegrad.ir.occurrence import is_own_file
from tracegrad.ir.wording import nearest, some

Declared = Callable[[str], Any]  # whether a name is deliberate

STOP = "stop_gradient"  # the name of all `stop_gradient`s


def predicate_of(deliberate: str | Collection[str] | Declared, program: Graph) -> Declared:
    """Returns what the caller declares as deliberate, as a predicate of names.

    Raises ValueError for a name that no rule of the program has."""
    if callable(deliberate):
        return deliberate
    names = {deliberate} if isinstance(deliberate, str) else set(deliberate)
    nodes = (found.node for found in program.walk())
    rules = {n.name for n in nodes if isinstance(n, CustomGradient) and not is_jaxs_rule(n)}
    if unknown := sorted(names - rules - {STOP}):
        near = some(nearest(unknown, sorted(rules | {STOP})), 3)
        raise ValueError(
            f"deliberate: the function has no rule called {some(unknown, 3)}. Did you mean {near}?"
        )
    return names.__contains__


def is_stop(found: Occurrence) -> bool:
    """Whether a node is a `stop_gradient`. (JAX's own change nothing.)"""
    return isinstance(found.node, StopGradient) and author_of(found) != "jax"


def is_sample(found: Occurrence) -> bool:
    """Whether a node draws samples of a gamma distribution."""
    return found.node.op in operations.IMPLICIT


def is_meant(node: CustomGradient, declared: Declared) -> bool:
    """Whether a rule differs on purpose: it is declared, or its function has a declared
    `stop_gradient`, or this package inserted the rule in order to change a gradient."""
    if declared(node.name) or _has_declared_stop(node, declared):
        return True
    codes = _jax.frame_positions(node.source.info)[0]
    ours = itertools.takewhile(lambda code: is_own_file(code.co_filename), codes)
    return any(code in CHANGES_GRADIENT for code in (*ours, code_of_rule(node)))


def _has_declared_stop(node: CustomGradient, declared: Declared) -> bool:
    return bool(declared(STOP) and node.primal.find(is_stop))


def without_deliberate(program: Graph, declared: Declared, right: Collection[str]) -> Graph:
    """Replaces each deliberate rule of a program, and each rule whose function draws samples of a
    gamma distribution, by its function without `stop_gradient`s; each declared `stop_gradient` by
    its operand, and each sample of a gamma distribution by the parameter times a constant sample.

    Args:
      right: the rules that are the derivatives of their functions: they stay, unless stops are
        left out.
    """

    def is_deliberate(found: Occurrence) -> bool:
        node = found.node
        if not isinstance(node, CustomGradient) or is_jaxs_rule(node):
            return False
        is_right = node.name in right and not _has_declared_stop(node, declared)
        return not is_right and (is_meant(node, declared) or bool(node.primal.find(is_sample)))

    while rules := program.find(is_deliberate):
        nodes = {found.node for found in rules}
        outermost = [o for o in rules if not any(node in nodes for node, _ in o.path)]
        program = around_each(program, outermost, _function_of_rule).graph
    if declared(STOP):
        program = _without_stops(program)
    return _replaced(program, is_sample, _sample)


def _replaced(
    program: Graph, wanted: Callable[[Occurrence], bool], around: Callable[..., Any]
) -> Graph:
    """Replaces operations outside of custom rules."""
    found = [each for each in program.find(wanted) if each.rule_around is None]
    return around_each(program, found, around).graph


def _without_stops(program: Graph) -> Graph:
    return _replaced(program, is_stop, lambda op, x: x)


def _function_of_rule(op: Op, *operands: Any) -> list[Any]:
    (node,) = op.nodes
    assert isinstance(node, CustomGradient)
    return _without_stops(node.primal)(*operands)


def _sample(op: Op, key: Any, shape: Any) -> Any:
    """Returns what varies with the parameter of a distribution as JAX's derivative says: by the
    implicit derivative, samples vary in another way than the algorithm that draws them."""
    constant = op(key, jnp.ones_like(shape))
    return jnp.log(shape) + constant if op.params["log_space"] else shape * constant
