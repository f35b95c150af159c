"""Which rule of `tracegrad.rules` cures a finding, at just its place; and what it changes.

What changes no gradient that is finite is offered to whoever asks for cures; the rest to whoever
asks for that.
"""

from __future__ import annotations

from tracegrad.insight.explanation import ByRule
from tracegrad.ir import CustomGradient, Occurrence, match, operations
from tracegrad.ir.selector import Selector
from tracegrad.rewriting import rules
from tracegrad.rewriting.kept_zeros import may_make_nan
from tracegrad.rewriting.repairs import position_past

NOTHING = ByRule()
_PAST = (
    "the gradient goes past {name} as if that were the identity, where it was zero or there was "
    "none (a straight-through estimator)"
)


def _here(found: Occurrence) -> Selector | None:
    """Selects a node by its line and its name; None where that cannot be told."""
    origin, node = found.origin, found.node
    if origin is None or any(isinstance(step, CustomGradient) for step, _ in found.path):
        return None
    line = match.source(origin.place)
    if isinstance(node, CustomGradient):  # a jitted function around it may have its name
        return line & match.call(node.name) & match.op(node.op)
    return line & match.op(node.op)


def rule_around(found: Occurrence) -> Occurrence:
    """The call of the custom gradient that a node is inside of, or the node."""
    for depth, (node, _) in enumerate(found.path):
        if isinstance(node, CustomGradient):
            return Occurrence(found.path[:depth], node)
    return found


def not_finite(found: Occurrence, given: float, is_all: bool) -> ByRule:
    """The rule for a node whose VJP makes NaN or Inf of a cotangent.

    Args:
      found: the node.
      given: the cotangent; NaN: not known.
      is_all: see `culprits.is_all_of_its_rule`.
    """
    around = rule_around(found)
    is_vjp = isinstance(around.node, CustomGradient) and around.node.kind == "vjp"
    # The backward would be run again, with its effects; zero in the place of what it returns would
    # discard whatever else it had added up.
    if is_vjp and (around.node.effects or not is_all):
        return NOTHING
    if around.origin is None or not (is_vjp or may_make_nan(around)):
        return NOTHING
    if given == 0 and not is_vjp:
        # Zero leaves it then, and arrives at what stands before it, often on the same line.
        return ByRule(rules.strong_zero(match.source(around.origin.place)))
    where = _here(around)
    if where is None or around.node.op in operations.FACTORS:
        return NOTHING  # what makes the other factor infinite is to be mended
    return ByRule(rules.finite_derivative(where))


def no_gradient(cause: str, found: Occurrence) -> ByRule:
    """Of a node that passes no gradient on, or zeros alone, by the class of why."""
    if cause == "custom rule":
        return own_derivative(found)
    if cause in ("rounding", "stop_gradient", "dead units", "clipped"):
        return straight_through(found)
    return NOTHING


def straight_through(found: Occurrence) -> ByRule:
    """Of a node with a zero derivative."""
    where, node = _here(found), found.node
    if where is None or position_past(node.inputs, node.outputs) is None:
        return NOTHING
    return ByRule(rules.straight_through(where), _PAST.format(name=node.name))


def own_derivative(found: Occurrence) -> ByRule:
    """Of a custom gradient that is not the derivative."""
    where = _here(found)
    if where is None:
        return NOTHING
    return ByRule(
        rules.own_derivative(where),
        f"the gradient of {found.node.name} is the derivative of what it computes, not its rule's",
    )


def refused(found: Occurrence) -> ByRule:
    """Of what JAX cannot differentiate, as a `lax.while_loop`, which has no reverse mode."""
    where = _here(found)
    has_effects = bool(found.node.effects)  # which would happen again
    if found.node.op != "while" or has_effects or where is None:
        return NOTHING
    return ByRule(rules.checkpointed_loop(where))
