"""Finds the operations that cut a source off from the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.gradient_types import is_numeric, type_of
from tracegrad.differentiation.smallest_cuts import Cut, CutsOnWay, explain_unconnected
from tracegrad.insight.explaining import by_rule
from tracegrad.insight.explaining.observed import Observed
from tracegrad.insight.explanation import Finding
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
from tracegrad.ir.authors import A_RULE, author_of
from tracegrad.ir.occurrence import is_own_file
from tracegrad.ir.wording import listed
from tracegrad.tracing.rule_errors import is_about_closing_over
from tracegrad.tracing.statics import Static
from tracegrad.variables import cut_gradients
from tracegrad.variables.capture import READ

_CURES = {
    "cast": "keep the float; for a straight-through gradient use `tracegrad.grad_pass_through`",
    "rounding": "a straight-through gradient: `tracegrad.grad_pass_through(jnp.{op})(x)`",
    "comparison": "a smooth gate (`jax.nn.sigmoid`), or a straight-through gradient",
    "argmax": "the maximum itself (`jnp.max`, `jnp.min`), `jax.nn.softmax` for a soft choice, or a "
    "straight-through gradient for what was chosen: `x + jax.lax.stop_gradient(chosen - x)`",
    "host conversion": "compute it in jax.numpy, or give the host function a gradient: "
    "`tracegrad.numpy_function(..., grad=...)`, or a `tracegrad.custom_gradient` around it",
    "custom rule": "let the rule return a cotangent for this input",
    "stop_gradient": "take it away, or move it to what is to be constant",
    "assignment": cut_gradients.CURE,
}
_INTEGER_CURE = (
    "return floats: convert back inside of the function that has the rule, or put the rule around "
    "both conversions"
)
_LOOP_CURE = (
    "for a loop: `jax.lax.scan`, `fori_loop` with a number of steps that is fixed, or "
    "`rules.checkpointed_loop`"
)


def _findings_of_cuts(path: str, cuts: CutsOnWay) -> Iterator[Finding]:
    """Returns a finding for each cut of an input; `path`: its name, `cuts`: its `smallest_cuts`."""
    for cut in cuts:
        cause, owner = _cause_of_cut(cut), author_of(cut.occurrence)
        text = _words(cut)
        cure = _CURES.get(cause, "").format(op=cut.occurrence.node.op)
        rule = by_rule.cure_no_gradient(cause, cut.occurrence)
        if cause == "custom rule" and (integers := _integer_results(cut.occurrence.node)):
            text = (
                f"{cut.occurrence.node.name} returns {integers}, integers, which have no gradient"
            )
            cure, rule = _INTEGER_CURE, {}
        is_asked_for = owner == A_RULE
        if is_asked_for:
            text, cure, rule = "rules.stop_gradient stops it, as asked for", "", {}
        elif isinstance(cut.occurrence.node, StopGradient):
            by = "your own" if owner == "yours" else f"{owner}'s"
            text = f"{by} {text}"
        more = {"cure": cure, "problem": not is_asked_for, **rule}
        yield Finding.of(cut.occurrence, cause, text, (path,), **more)


def _integer_results(node: Node) -> str:
    """Returns the types of the results of a function with a rule if none is a float, else ""."""
    if any(has_gradient(value) for value in node.outputs):
        return ""
    return listed([_jax.type_text(value.aval) for value in node.outputs], 3)


def _words(cut: Cut) -> str:
    """Returns the description of a cut without its line."""
    return str(cut).split(" at ")[0] if cut.occurrence.origin is not None else str(cut)


def _cause_of_cut(cut: Cut) -> str:
    """Returns the class of a cut, in one or two words."""
    node = cut.occurrence.node
    if isinstance(node, StopGradient):
        return "stop_gradient"
    if isinstance(node, CustomGradient):
        return "custom rule"
    if node.primitive is READ:
        return "assignment"
    if node.op in operations.CALLBACKS:
        return "host conversion"
    if node.op in ("convert_element_type", "bitcast_convert_type"):
        return "cast"
    if node.op in operations.CHOICES:
        return "argmax"
    if node.op in operations.COMPARISONS or _called(node, "searchsorted"):
        return "comparison"
    if node.op in operations.ROUNDINGS:
        return "rounding"
    return "zero derivative"


def _called(node: Node, function: str) -> bool:
    """Whether a function of JAX or of this package with some name made a node."""
    for frame in _jax.frames(node.source.info):
        if not is_own_file(frame.file_name):
            return False
        if frame.function_name.rsplit(".", 1)[-1] in (function, f"_{function}"):
            return True
    return False


def cut_off(
    program: Graph,
    inputs: Sequence[Any],
    path: str,
    i: int,
    cuts: CutsOnWay | None,
) -> Iterator[Finding]:
    """Returns findings on why nothing connects a source with the results.

    Args:
      program, inputs: the graph and the arrays of its inputs.
      path, i: the name of the source, and the index of its input.
      cuts: its `smallest_cuts` with respect to the outputs with cotangents.
    """
    if cuts is not None:
        yield from _findings_of_cuts(path, cuts)
        return
    constant = _closed_over(program, inputs[i])
    if constant is not None:
        yield Finding(
            "closed over",
            "nothing uses it; the function closes over an array of the same numbers, which is a "
            "constant to it",
            (path,),
            origin=constant.origin,
            cure="use the argument in the function's body",
        )
    else:
        yield Finding(
            "unused",
            explain_unconnected(program, i, cuts),
            (path,),
            cure="use it where the result is computed, or leave it out of wrt; a derivative that "
            "the function takes may not depend on it, as the second derivative of relu",
        )


def _closed_over(program: Graph, array: Any) -> Occurrence | None:
    """Returns a use of a constant of the program with the shape and numbers of an array."""
    wanted = np.asarray(array)
    # Arrays of one number (zeros, ones) are common: such a constant must be the same object.
    is_telling = wanted.size > 0 and bool(np.any(wanted != wanted.ravel()[0]))

    def fits(constant: Any) -> bool:
        if constant is array:
            return True
        if not is_telling or np.shape(constant) != wanted.shape:
            return False
        if _jax.is_tracer(constant) or not is_numeric(constant):
            return False
        return bool(np.array_equal(np.asarray(constant), wanted))

    for found in program.walk():
        constants = program.region_of(found).constants
        read = [v for v in found.node.inputs if isinstance(v, Value) and v in constants]
        if any(fits(constants[v]) for v in read):
            return found
    return None


def refusals(observed: Observed) -> Iterator[Finding]:
    """Returns a finding for each operation that JAX cannot differentiate, with JAX's message."""
    for found, words in observed.refused.items():
        op = found.node.op
        cause = "host conversion" if op in operations.CALLBACKS else "not differentiable"
        if isinstance(found.node, CustomGradient) and is_about_closing_over(words):
            yield _closing_over(found)
            continue
        yield Finding.of(
            found,
            cause,
            f"JAX cannot differentiate {found.node.name}: {words}",
            cure=_LOOP_CURE if op == "while" else _CURES.get(cause, ""),
            operation=op,
            **by_rule.cure_refusal(found),
        )


def _closing_over(found: Occurrence) -> Finding:
    """Returns the finding on a function with a rule that closes over a differentiated value."""
    name = found.node.name
    return Finding.of(
        found,
        "closed over by a rule",
        f"{name} closes over a value (or has an array in nondiff_argnums), and its rule has no "
        f"gradient for that: JAX cannot differentiate {name} here",
        cure=f"make the value an argument of {name}, and let its rule return None or its gradient",
        **by_rule.cure_custom_gradient(found),
    )


def type_without_gradient(path: str, leaf: Any, is_meant: bool) -> Finding:
    """Returns the finding on a source whose type has no gradient. `is_meant`: whether the source is
    meant to have a gradient, unlike a mask or a count of a model."""
    aval = type_of(leaf)
    kind = type(leaf).__name__ if aval is None else str(aval.dtype)
    if isinstance(leaf, Static):
        kind = f"the number {leaf!r} of an equinox module"
    cure = "make it a float array"
    cure = f"{cure}, or leave it out of wrt" if is_meant else f"if it is a parameter, {cure}"
    return Finding(
        "no gradient",
        f"it is {kind}, which has no gradient",
        (path,),
        problem=is_numeric(leaf) and is_meant,
        cure=cure if is_numeric(leaf) else "",
    )


def state_of_model(path: str) -> Finding:
    """Returns the finding on a source that is not updated by its gradient (statistics, counts)."""
    return Finding(
        "state",
        "it is no parameter to the model: statistics, counts and the like need no gradient",
        (path,),
        problem=False,
    )
