"""Finds where the gradient of a connected source becomes all zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.insight.explaining import by_rule
from tracegrad.insight.explaining.culprits import largest_in, operand_statistic
from tracegrad.insight.explaining.detail import Detail
from tracegrad.insight.explaining.observed import Observed, Place
from tracegrad.insight.explaining.slopes import CURES
from tracegrad.insight.explaining.statistics import EDGE_NORM, GREATEST, LEAST, NORM
from tracegrad.insight.explaining.visits import is_entered
from tracegrad.insight.explanation import Finding, SourceReport
from tracegrad.ir import (
    CustomGradient,
    Occurrence,
    Value,
    dtype_of,
    operations,
)
from tracegrad.ir.inlined import inside, inside_result, onward, outside
from tracegrad.ir.occurrence import Path
from tracegrad.ir.wording import some
from tracegrad.rewriting.kept_zeros import keeps_zeros

_ZERO_WORDS = {
    "untaken branch": "its branch is not taken in this call",
    "no steps": "it takes no steps in this call",
    "dead units": "no unit of it is active on this batch",
    "clipped": "every element is outside of the bounds, where the derivative is zero",
    "multiplied by zero": "it is multiplied by zeros",
    "index out of bounds": "no index selects it (those out of bounds are dropped)",
    "overwritten": "all of it that counts is overwritten",
    "not read": "it is written where nothing is read, or out of bounds, where it is dropped",
    "saturated": "it is saturated: its derivative is zero in this precision",
    "custom rule": "its rule returns zeros",
    "underflow": "the cotangent underflows in {dtype}: what comes in is too small for that",
    "cancelled": "what comes back through its uses adds up to zero",
    "zero derivative": "its derivative is zero here",
}
_CAUSES = {
    "select_n": "untaken branch",
    **dict.fromkeys(("mul", "dot_general", "conv_general_dilated", "div"), "multiplied by zero"),
    **dict.fromkeys(("gather", "dynamic_slice"), "index out of bounds"),
    **dict.fromkeys(("scatter", "scatter-add", "dynamic_update_slice"), "not read"),
    **dict.fromkeys(("tanh", "logistic", "exp", "exp2", "erf"), "saturated"),
}
_ZERO_CURES = {
    "dead units": "smaller steps or biases, weights that do not start at zero, "
    "`jax.nn.leaky_relu`, `jax.nn.gelu`",
    "multiplied by zero": "a factor that is not all zeros: see what makes it (a mask, the state "
    "that a loop starts with, a normalisation of one example, an initialisation with zeros)",
    "saturated": "normalise what goes in, or compute with the logarithm",
    "untaken branch": "arguments for which it is taken: a call that does not use it says nothing",
    "no steps": "arguments for which it takes some: a call without steps says nothing",
    "index out of bounds": 'an index in bounds; `jnp.take(..., mode="fill")` is for padding',
    "overwritten": "write to another part of it, or read it before",
    "not read": "an index in bounds, of a place that is read",
    "custom rule": "let the rule return a cotangent for this input",
    "underflow": "a loss scale (`scale * loss`, and the gradient divided by it in float32), "
    "bfloat16, or float32",
    "clipped": "a soft bound (`jnp.tanh`, `jax.nn.softplus`), or a straight-through gradient",
}
# Causes that are no mistake: the derivative may be zero at an extremum.
_HEALTHY = ("zero derivative", "cancelled")


def zero_gradients(
    look: Callable[[Detail], Observed],
    reports: Sequence[SourceReport],
    sources: dict[str, int | None],
    inputs: Sequence[Any],
) -> Iterator[Finding]:
    """Returns findings on where the gradients of connected sources became all zeros, and on dead
    units that others of the sources have a way past.

    Args:
      look: returns what is observed with some detail.
      inputs: the arrays of the graph's inputs.
    """
    is_lost_in_part = _is_lost_in_part(look(Detail.FEW))
    indices = [
        (r.path, index, r.zeros >= 1)
        for r in reports
        if r.connected and r.size and (r.zeros >= 1 or (is_lost_in_part and r.is_finite))
        if (index := sources[r.path]) is not None
    ]
    if not indices:  # asking each input whether it is all zeros takes time
        return
    observed = look(Detail.ALL)
    given_some = {r.path for r in reports if r.connected and r.zeros < 1}
    starting = {
        observed.graph.inputs[i]: path
        for path, i in sources.items()
        if i is not None and path in given_some and _is_all_zeros(inputs[i])
    }
    named = set[Occurrence]()
    for path, index, is_zero in sorted(indices, key=lambda each: not each[2]):
        for found, (cause, value) in _nodes_that_give_zeros(observed, index).items():
            if is_zero:
                named.add(found)
            elif cause != "dead units" or found in named:
                continue
            words, cure = _ZERO_WORDS[cause], _ZERO_CURES.get(cause, "")
            words = words.format(dtype=getattr(value.aval, "dtype", ""))
            if cause == "underflow" and _is_wide(value):
                cure = CURES["vanishing"]
            factors = list[str]()
            if cause == "multiplied by zero" and starting:
                factors = _starting_factors(observed, found, value, starting)
            if factors:
                words = f"it is multiplied by {some(factors, 3)}, all zeros, which gets a gradient"
                words, cure = f"{words} itself", "none is needed: the first step changes that"
            which = _which(observed, found) if cause == "dead units" else ""
            yield Finding.of(
                found,
                cause,
                f"{found.node.name}{which}: {words}",
                (path,),
                cure=cure,
                problem=is_zero and cause not in _HEALTHY and not factors,
                **by_rule.cure_no_gradient(cause, found),
            )


def _is_lost_in_part(observed: Observed) -> bool:
    """Whether some operation gets no cotangent, in a program that may have rectifiers."""
    is_zero = (not np.any(stat[..., NORM]) for _, _, stat in observed.of("ct"))
    return "max" in observed.graph.operations and any(is_zero)


def _starting_factors(
    observed: Observed,
    found: Occurrence,
    value: Value,
    starting: Mapping[Value, str],
) -> list[str]:
    """Returns the sources that are zero now but get a gradient, and from which a factor is computed
    by which a node multiplies the cotangent of `value`: the second factor of a low-rank adapter,
    the last scale of a block."""

    def operands_given_some(here: Occurrence) -> Iterator[Value]:
        """Yields the operands to which the VJP of a node may give a nonzero cotangent."""
        region = observed.region(here.path)
        for v in here.node.inputs:
            if not isinstance(v, Value):
                continue
            is_shared = len(region.users.get(v, ())) > 1 or v in region.results
            # If the value has other uses, its cotangent may come from them.
            if v not in region.producers or not is_shared or _gives_some(observed, Place(here), v):
                yield v

    factors = [v for v in found.node.inputs if isinstance(v, Value) and v is not value]
    pending: list[tuple[Path, Value]] = [(found.path, v) for v in factors]
    seen = set(pending)
    while pending:
        path, value = pending.pop()
        node = observed.region(path).producers.get(value)
        before: list[tuple[Path, Any]] = []
        if node is None:
            before = outside(path, value)[:1] if path else [(path, value)]  # not of the last step
        elif observed.arrives(Place(here := Occurrence(path, node)), node.outputs.index(value)):
            if is_entered(node):
                before = [inside_result(here, value, name) for name in node.regions]
            else:
                before = [(path, operand) for operand in operands_given_some(here)]
        new = {each for each in before if isinstance(each[1], Value)} - seen
        seen |= new
        pending += new
    return [name for each, name in starting.items() if ((), each) in seen]


def _is_all_zeros(array: Any) -> bool:
    is_here = getattr(array, "is_fully_addressable", True)  # if not, XLA computes `any`
    return not np.any(np.asarray(array) if is_here else array)


def _nodes_that_give_zeros(observed: Observed, source: int) -> dict[Occurrence, tuple[str, Value]]:
    """Returns the nodes at which the gradient of a connected source becomes zero, each with the
    cause and the operand whose cotangent is zero."""
    causes: dict[Occurrence, tuple[str, Value]] = {}
    # For each value: the steps of the scans around it (if it dies in a step that is known), and
    # whether its gradient may be a sum, over its uses or over the steps of a scan.
    pending: list[tuple[Path, Value, tuple[int, ...], bool]]
    pending = [((), observed.graph.inputs[source], (), False)]
    seen = set()
    while pending:
        path, value, steps, is_sum = pending.pop()
        if (path, value) in seen:
            continue
        seen.add((path, value))
        region = observed.region(path)
        uses = [v for node in region.users.get(value, ()) for v in node.inputs if v is value]
        is_sum |= len(uses) + (value in region.results) > 1
        for node in region.users.get(value, ()):
            here = Occurrence(path, node)
            place = Place(here, steps)
            given = observed.of_results("ct", place)
            if all(ct is None for ct in given) or here in observed.refused:
                continue
            if not observed.arrives(place):
                pending += [(path, out, steps, False) for out in node.outputs]
            elif not is_entered(node):
                if is_sum and _gives_some(observed, place, value):
                    causes[here] = "cancelled", value
                    break
                causes[here] = _why_zero(observed, place, value), value
            else:
                is_cond = node.primitive is _jax.COND
                # The branches that ran at any step, and the branches that ran at this step.
                places = Place(here), place
                ran, now = (observed.branches(p) if is_cond else node.regions for p in places)
                if node.primitive is _jax.SCAN and node.params["length"] == 0:
                    causes[here] = "no steps", value
                    continue
                for path_inside, inner in inside(here, value):
                    if path_inside[-1][1] in now:
                        into = _with_last_step(observed, place, inner)
                        is_summed = node.primitive is _jax.SCAN and into == steps
                        pending.append((path_inside, inner, into, is_sum or is_summed))
                    elif path_inside[-1][1] not in ran:
                        branch = observed.region(path_inside)
                        if inner in branch.users or inner in branch.results:
                            causes[here] = "untaken branch", value
        for outer, each in onward(path, value) if path else ():
            scans = sum(node.primitive is _jax.SCAN for node, _ in path[:-1])
            call = Place(Occurrence(path[:-1], path[-1][0]), steps[:scans])
            if len(outer) == len(path):  # the next step
                pending.append((outer, each, _with_last_step(observed, call, each), False))
            elif not observed.arrives(call, call.node.outputs.index(each)):
                pending.append((outer, each, call.steps, False))
    return causes


def _with_last_step(observed: Observed, call: Place, inner: Value) -> tuple[int, ...]:
    """Returns the steps of a call. If an input of its region is a carry of a scan, adds the last
    step of the reverse pass in which the carry gets a cotangent: there it becomes zero."""
    if call.node.primitive is not _jax.SCAN:
        return call.steps
    first, count = _jax.scan_split(call.node.params)
    j = call.node.regions["jaxpr"].inputs.index(inner) - first
    norms = observed.get("carry", call, j) if 0 <= j < count else None
    if norms is None or norms.ndim != 2 or not np.any(norms[:, NORM]):
        return call.steps
    given = np.flatnonzero(norms[:, NORM])
    return (*call.steps, int(given[-1 if call.node.params["reverse"] else 0]))


def _is_zero(stat: Any) -> bool:
    return not np.any(stat[..., [LEAST, GREATEST]])


def _gives_some(observed: Observed, place: Place, value: Value) -> bool:
    """Whether the VJP of a node gives an operand a cotangent that is not zero."""
    places = [i for i, v in enumerate(place.node.inputs) if v is value]
    edges = [observed.get("edge", place, i) for i in places]
    return any(edge is not None and np.any(edge[..., EDGE_NORM] > 0) for edge in edges)


def _why_zero(observed: Observed, place: Place, value: Value) -> str:
    """Returns the cause why a node gives an operand a zero cotangent."""
    node = place.node
    if node.op in ("scatter", "dynamic_update_slice") and node.inputs[0] is value:
        return "overwritten"
    if isinstance(node, CustomGradient):
        if keeps_zeros(node):
            return _CAUSES.get(node.name, "zero derivative")  # named after the operation replaced
        return "dead units" if node.name == "relu" else "custom rule"
    if node.op == "convert_element_type":  # the VJP is a cast, too
        return "underflow"
    if node.op in ("max", "min", "clamp"):
        others = [operand_statistic(observed, place, v) for v in node.inputs if v is not value]
        rectifies = node.op == "max" and any(s is not None and _is_zero(s) for s in others)
        return "dead units" if rectifies else "clipped"
    cause = _CAUSES.get(node.op, "zero derivative")
    may_underflow = cause in ("multiplied by zero", "saturated", "zero derivative")
    return "underflow" if may_underflow and _underflows(observed, place, value) else cause


def _underflows(observed: Observed, place: Place, value: Value) -> bool:
    """Whether the largest cotangent of a node, times the largest factor of a product, is too small
    for the dtype of an operand, and not zero."""
    node, ct = place.node, observed.get("ct", place)
    if ct is None:
        return False
    is_product = node.op in operations.FACTORS and node.op != "div"
    others = [v for v in node.inputs if v is not value] if is_product else []
    stats = [operand_statistic(observed, place, v) for v in others]
    factors = list(map(largest_in, stats)) or [1.0]
    info = _finfo(value)
    # XLA takes float32 below `tiny` for zero, and small elements may meet factors as small as eps.
    wide = float(info.tiny) / float(info.eps)
    least = wide if _is_wide(value) else float(info.smallest_subnormal)
    return any(0 < largest_in(ct) * factor <= least for factor in factors)


def _is_wide(value: Value) -> bool:
    """Whether a value has a dtype with the exponents of float32, or more."""
    return bool(_finfo(value).tiny < 1e-30)


def _finfo(value: Value) -> Any:
    finfo: Any = jnp.finfo  # knows bfloat16, too
    return finfo(dtype_of(value))


def _which(observed: Observed, found: Occurrence) -> str:
    """Returns words on which of several rectifiers on its line a node is, or ""."""
    alike = [
        other
        for other in observed.graph.walk()
        if other.node.name == found.node.name
        and other.origin == found.origin
        and other.rule_around is None
    ]
    if len(alike) < 2 or found not in alike or found.origin is None:
        return ""
    return f" (number {alike.index(found) + 1} of {len(alike)} on that line)"
