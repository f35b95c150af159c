"""Chooses the rule of `tracegrad.rules` that cures a finding at its place; says what it changes.

`Explanation.cures()` has the rules that change no finite gradient; `cures(changing=True)` has all.
"""

from __future__ import annotations

from typing import Any

from tracegrad.ir import CustomGradient, Occurrence, match, operations
from tracegrad.ir.selector import Selector
from tracegrad.rewriting import rules
from tracegrad.rewriting.kept_zeros import may_make_nan
from tracegrad.rewriting.repairs import positions_past

Cure = dict[str, Any]  # the fields `rule` and `changes` of a `Finding`; {} if no rule cures it

_PAST = "the gradient passes {name} as if {name} were the identity"


def _selector_of(found: Occurrence) -> Selector | None:
    """Returns a selector of a node by its line and operation; None if the line is not known, or if
    the node is inside of a custom rule."""
    origin, node = found.origin, found.node
    if origin is None or any(isinstance(step, CustomGradient) for step, _ in found.path):
        return None
    line = match.source(origin.place)
    if isinstance(node, CustomGradient):  # match op too: a jitted function may have the same name
        return line & match.call(node.name) & match.op(node.op)
    return line & match.op(node.op)


def outermost_rule(found: Occurrence) -> Occurrence:
    """Returns the outermost call of a custom rule around a node, or the node if there is none."""
    for depth, (node, _) in enumerate(found.path):
        if isinstance(node, CustomGradient):
            return Occurrence(found.path[:depth], node)
    return found


def cure_bad_vjp(found: Occurrence, given: float, is_all: bool) -> Cure:
    """Returns the rule for a node whose VJP turns a finite cotangent into NaN or Inf.

    Args:
      found: the node.
      given: the cotangent; NaN if it is not known.
      is_all: whether the backward of the rule around the node adds nothing finite to the NaNs and
        Infs that it makes.
    """
    around = outermost_rule(found)
    is_vjp = isinstance(around.node, CustomGradient) and around.node.kind == "vjp"
    # The cure would run the backward again, with its effects; and zeros in place of its results
    # would discard finite terms that the backward had added.
    if is_vjp and (around.node.effects or not is_all):
        return {}
    if around.origin is None or not (is_vjp or may_make_nan(around)):
        return {}
    if given == 0 and not is_vjp:
        # The node then passes zero on to the operations before it, often on the same line.
        return {"rule": rules.strong_zero(match.source(around.origin.place))}
    where = _selector_of(around)
    if where is None or around.node.op in operations.FACTORS:
        return {}  # the cure is to mend the operation that made the other factor infinite
    return {"rule": rules.finite_derivative(where)}


def cure_no_gradient(cause: str, found: Occurrence) -> Cure:
    """Returns the rule for a node that passes on no gradient or only zeros; `cause`: the finding's
    class."""
    if cause == "custom rule":
        return cure_custom_gradient(found)
    if cause in ("rounding", "stop_gradient", "dead units", "clipped"):
        return _cure_zero_derivative(found)
    return {}


def _cure_zero_derivative(found: Occurrence) -> Cure:
    """Returns the rule for a node with a zero derivative."""
    where, node = _selector_of(found), found.node
    if where is None or not positions_past(node.inputs, node.outputs):
        return {}
    return {"rule": rules.straight_through(where), "changes": _PAST.format(name=node.name)}


def cure_custom_gradient(found: Occurrence) -> Cure:
    """Returns the rule for a custom gradient that is not the derivative of its function."""
    where = _selector_of(found)
    if where is None:
        return {}
    of, its = f"the gradient of {found.node.name}", "the derivative of what it computes"
    return {"rule": rules.own_derivative(where), "changes": f"{of} is {its}, not its rule's"}


def cure_refusal(found: Occurrence) -> Cure:
    """Returns the rule for a node that JAX cannot differentiate: only for a `lax.while_loop`."""
    where = _selector_of(found)
    has_effects = bool(found.node.effects)  # a checkpointed loop would repeat them
    if found.node.op != "while" or has_effects or where is None:
        return {}
    return {"rule": rules.checkpointed_loop(where)}
