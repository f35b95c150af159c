"""Makes the findings on a NaN or Inf: where it began, from what numbers, and the known cure."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from tracegrad.insight.explaining import by_rule
from tracegrad.insight.explaining.culprits import (
    Culprit,
    FromOutside,
    backward_culprit,
    first_culprit,
    forward_culprit,
    has_inf,
    is_all_of_its_rule,
    makers,
    operand_ranges,
    users,
)
from tracegrad.insight.explaining.cures import backward_cure, forward_cure
from tracegrad.insight.explaining.observed import Observed
from tracegrad.insight.explaining.statistics import INF, NAN, NORM
from tracegrad.insight.explanation import Finding, number_text
from tracegrad.ir import CustomGradient, Node, Occurrence, operations
from tracegrad.ir.occurrence import at
from tracegrad.ir.wording import counted
from tracegrad.rewriting.kept_zeros import keeps_zeros

_LARGE = 1e12  # a cotangent with a norm above this has exploded


def not_finite(
    observed: Observed,
    sources: dict[str, int | None],
    others: Mapping[int, str],
) -> list[Finding]:
    """Returns findings on where the NaNs and Infs of a result or a gradient began.

    Args:
      observed: what was measured with `Detail.BAD`.
      sources: maps the path of a source to the index of its input.
      others: the names of inputs that are not sources.
    """
    stats = observed.stats
    names = {i: path for path, i in sources.items() if i is not None}
    touched = tuple(
        path
        for i, path in names.items()
        if (stat := stats.get(("source", None, i))) is not None and stat[NAN] + stat[INF] > 0
    )
    found: list[Finding] = []
    out = stats["output", None, 0]
    if out[NAN] + out[INF] > 0:
        which = NAN if out[NAN] else INF
        culprit = forward_culprit(observed, (), (), observed.graph.outputs[0], which)
        if isinstance(culprit, Culprit):
            found.append(_forward_finding(observed, culprit, touched))
        elif culprit is not None:
            found.append(_outside_finding(observed, culprit, which, names, others, touched))
    is_explained = bool(found)
    found += [
        _in_an_input("NaN", path, int(stat[NAN]), (path,))
        for i, path in names.items()
        if (stat := stats.get(("input", None, i))) is not None and stat[NAN] > 0
    ]
    if not is_explained:  # the result is finite: a NaN in an input is masked
        culprit_back = backward_culprit(observed)
        if culprit_back is not None:
            made = _maker_of_factor(observed, culprit_back)
            if made is not None:
                found.append(_forward_finding(observed, made, touched, culprit_back))
            else:
                found.append(_backward_finding(observed, culprit_back, touched))
        elif touched and not found:
            found.append(Finding("not finite", "it came in with the cotangent", touched))
    return found


def _outside_finding(
    observed: Observed,
    outside: FromOutside,
    which: int,
    names: Mapping[int, str],
    others: Mapping[int, str],
    touched: tuple[str, ...],
) -> Finding:
    """Returns the finding on a NaN or Inf that was in an input or in a constant."""
    kind = "NaN" if which == NAN else "Inf"
    if outside.index is None:
        return Finding(
            f"{kind} in an input",
            f"a constant of the function (an array that it closes over, a number) is {kind}",
            (),
            origin=outside.user.origin if outside.user else None,
            cure="see what the constant is computed of (a division by zero, as by `n - ddof`, "
            "say), or why a `where` chooses it",
        )
    path = names.get(outside.index) or others.get(outside.index, "that is not a source")
    count = int(observed.stats["input", None, outside.index][which])
    return _in_an_input(kind, path, count, (path,) if outside.index in names else touched)


def _in_an_input(kind: str, path: str, count: int, sources: tuple[str, ...]) -> Finding:
    words = f"the argument {path} has {counted(count, kind)} already"
    cure = "look at the data: `jnp.isfinite(x).all()`; leave such rows out, or mask them"
    return Finding(f"{kind} in an input", words, sources, cure=cure)


def _forward_finding(
    observed: Observed,
    culprit: Culprit,
    touched: tuple[str, ...],
    factor_of: Culprit | None = None,
) -> Finding:
    """Returns the finding on an operation of the forward pass that made a NaN or Inf.

    `factor_of`: the VJP that multiplies a cotangent by it, if the program's result is finite.
    """
    found = culprit.place.occurrence
    ranges = operand_ranges(observed, culprit.place)
    words = f"{found.node.name} makes {culprit.kind} in the forward pass"
    words += f" of {ranges}" if ranges else ""
    made_inf = None
    if culprit.kind == "NaN":
        made_inf = first_culprit(observed, culprit.place, found.node.inputs, [INF])
    if made_inf is not None:  # the operation that made the Inf is the one to mend
        first = made_inf.place.occurrence
        origin = found.origin or first.origin
        words = (
            f"{first.node.name} makes Inf of {operand_ranges(observed, made_inf.place)}, and "
            f"{found.node.name}{at(origin and origin.place)} makes NaN of that"
        )
        culprit, found = made_inf, first
    place = culprit.place
    operation = _operation(found.node)
    cure, rule = forward_cure(_cured_as(found.node), users(observed, place)), by_rule.Cure()
    if factor_of is not None:
        product = factor_of.place.occurrence
        where = at(product.origin and product.origin.place)
        words += f"; in the reverse pass {product.node.name}{where} multiplies a cotangent by that"
        # The result is finite, so the cotangent is zero where a contraction makes NaN of the NaN.
        given = 0.0 if product.node.op in operations.CONTRACTIONS else factor_of.given
        rule = by_rule.cure_bad_vjp(product, given, False)
    words, cure = _with_float16(found.node, words, cure)
    return Finding.of(
        found,
        f"{culprit.kind} in the forward pass",
        words,
        touched,
        cure=cure,
        operation=operation,
        step=place.step,
        **rule,
    )


def _with_float16(node: Node, words: str, cure: str) -> tuple[str, str]:
    """Adds to the words and the cure of a finding what concerns float16, if the node returns it."""
    if all(getattr(v.aval, "dtype", None) != np.float16 for v in node.outputs):
        return words, cure
    more = "compute this in bfloat16 or float32, or lower the loss scale if there is one"
    cure = f"{cure}; or {more}" if cure else more
    return f"{words}; it computes in float16, which ends at 65504", cure


def _operation(node: Node) -> str:
    """Returns the name of a node's operation, also if a cure replaced it by a custom gradient."""
    return node.name if isinstance(node, CustomGradient) and keeps_zeros(node) else node.op


def _cured_as(node: Node) -> str:
    """Returns the operation whose cures a node has: a positive power is a product."""
    is_product = node.op == "integer_pow" and node.params["y"] > 0
    return "mul" if is_product else _operation(node)


def _maker_of_factor(observed: Observed, culprit: Culprit) -> Culprit | None:
    """Returns what made the NaN by which a product multiplies a cotangent; for a product of
    matrices, whose culprit has no operands to show, also what made an Inf."""
    node = culprit.place.node
    kinds = (NAN, INF) if node.op in operations.CONTRACTIONS else (NAN,) if node.op == "mul" else ()
    return first_culprit(observed, culprit.place, node.inputs, kinds)


def _backward_finding(
    observed: Observed,
    culprit: Culprit,
    touched: tuple[str, ...],
) -> Finding:
    """Returns the finding on a VJP that made NaN or Inf of finite cotangents."""
    place = culprit.place
    found = place.occurrence
    node, origin = found.node, found.origin
    known = [number_text(x) for x in culprit.operands if not math.isnan(x)]
    words = f"the derivative of {node.name}"
    through, grown = "", _norm_before(observed, culprit)
    if grown > _LARGE:
        through = f": the norm of the cotangent has grown to {number_text(grown)} before"
    elif culprit.given == 0:
        through = (
            ", where the cotangent that comes in is 0 (by a mask, an underflow): 0 * inf is NaN"
        )
    elif not math.isnan(culprit.given):
        through = f", of a cotangent {number_text(culprit.given)}"
    for depth, (rule, name) in enumerate(found.path):
        if name in ("backward", "jvp"):
            words, through = f"in the rule of {rule.name} {node.name}", ""
            origin = observed.lines.get(Occurrence(found.path[:depth], rule), origin)
            break
    places = at(", ".join(known))
    made_by, used_by = makers(observed, place), users(observed, place)
    operation = _operation(node)
    is_kept = isinstance(node, CustomGradient) and keeps_zeros(node)
    is_all = is_kept or is_all_of_its_rule(observed, place)
    cure = backward_cure(_cured_as(node), culprit.operands, culprit.given, made_by, used_by)
    if grown > _LARGE:
        cure = "the gradient explodes: normalisation, a smaller initialisation, fewer steps"
    # The zero is no mask's if the logarithm's Inf becomes finite later, as in exp(log(0)): the
    # gradient is a limit then, and not the zero that a rule would give.
    is_inf = node.op == "log" and has_inf(observed, place)
    ends = users(observed, place, of_inf=True) if is_inf else []
    is_limit = culprit.given == 0 and not operations.BOUNDED.issuperset(ends)
    of_rule = {} if is_limit else by_rule.cure_bad_vjp(found, culprit.given, is_all)
    words += f"{places} is not finite{through}{_made_before(observed, culprit)}"
    words, cure = _with_float16(node, words, cure)
    return Finding.of(
        found,
        f"{culprit.kind} in the reverse pass",
        words,
        touched,
        origin=origin,
        cure=cure,
        operation=operation,
        operands=culprit.operands,
        step=place.step,
        **of_rule,
    )


def _norm_before(observed: Observed, culprit: Culprit) -> float:
    """Returns the largest norm of a cotangent that comes into a product; 0 for other operations."""
    if culprit.place.node.op not in operations.PRODUCTS:
        return 0.0
    given = observed.of_results("ct", culprit.place)
    norms = (float(ct.reshape(-1, ct.shape[-1])[0, NORM]) for ct in given if ct is not None)
    return max(norms, default=0.0)


def _made_before(observed: Observed, culprit: Culprit) -> str:
    """Returns words on the operation of the forward pass that made an infinite operand, or ""."""
    pairs = zip(culprit.place.node.inputs, culprit.operands, strict=False)
    infinite = [value for value, x in pairs if math.isinf(x)]  # (NaN: not known)
    made = first_culprit(observed, culprit.place, infinite, [INF])
    if made is None:
        return ""
    origin = made.place.occurrence.origin
    return f"; {made.place.node.name}{at(origin and origin.place)} made the Inf"
