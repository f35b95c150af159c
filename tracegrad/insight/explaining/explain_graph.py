"""Explains a graph: measures its values and cotangents, and derives all findings from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.connectivity import connections
from tracegrad.differentiation.smallest_cuts import CutsOnWay, smallest_cuts
from tracegrad.insight.explaining.custom_rules import changed_rules
from tracegrad.insight.explaining.cut_off import cut_off, refusals
from tracegrad.insight.explaining.detail import Detail
from tracegrad.insight.explaining.not_finite import not_finite
from tracegrad.insight.explaining.observed import Observed, Place
from tracegrad.insight.explaining.padding import normalised_padding
from tracegrad.insight.explaining.runs import measure
from tracegrad.insight.explaining.slopes import CURES, slopes
from tracegrad.insight.explaining.statistics import GREATEST, INF, LEAST, NAN, NORM, ZEROS
from tracegrad.insight.explaining.steps import slopes_of_steps
from tracegrad.insight.explaining.zeros import zero_gradients
from tracegrad.insight.explanation import (
    Explanation,
    Finding,
    SourceReport,
    number_text,
    shared_scope,
)
from tracegrad.ir import CustomGradient, Graph
from tracegrad.ir.wording import counted

# Causes whose texts contain measured numbers or names of factors, which differ between layers.
_MEASURED = ("dead units", "changed by a rule", "rows without variance", "multiplied by zero")


def explain_graph(
    program: Graph,
    inputs: Sequence[Any],
    sources: dict[str, int | None],
    name: str,
    excused: Mapping[str, Finding],
    others: Mapping[int, str],
) -> Explanation:
    """Explains the gradients of the first output of a graph, a float scalar.

    Args:
      program: the graph.
      inputs: the arrays of its inputs.
      sources: maps the path of a source to the index of its input; to None if the type of the
        source has no gradient.
      name: the name of the function.
      excused: for each source that need not get a gradient, the finding that says so if it gets
        none: every source without an input, and the sources that are no parameters.
      others: the names of inputs that are not sources.
    """
    differentiated = {i for i in sources.values() if i is not None}
    reached = connections(program, differentiated)[0]
    findings: list[Finding] = []
    flowing = [False] * len(program.inputs)
    cuts: list[CutsOnWay | None] = []
    for path, i in sources.items():
        if i is not None and i in reached:
            flowing[i] = True
        elif i is None or path in excused:
            findings.append(excused[path])
        else:
            cuts = cuts or smallest_cuts(program, [0], differentiated)
            findings += cut_off(program, inputs, path, i, cuts[i])
    observed = measure(program, flowing, inputs, Detail.FEW)
    findings += refusals(observed)

    def look(detail: Detail) -> Observed:
        """Returns what is observed with at least so much detail; measures again if needed."""
        nonlocal observed
        if observed.detail < detail:
            more = measure(program, flowing, inputs, detail)
            observed = dataclasses.replace(more, stats={**observed.stats, **more.stats})
        return observed

    if _looks_bad(observed):  # for a gradient of zeros all is measured anyway
        detail = Detail.ALL if _has_gradient_of_zeros(observed) else Detail.BAD
        findings += not_finite(look(detail), sources, others)
    reports = _reports(observed, sources, findings)
    norms = {r.path: r.norm for r in reports if r.connected and math.isfinite(r.norm)}
    findings += zero_gradients(look, reports, sources, inputs)
    findings += normalised_padding(observed, norms)
    # These findings already explain a gradient that explodes at their line.
    known = {
        (f.origin, f.scope)
        for f in findings
        if f.cause == "rows without variance" or f.cause.endswith("in the reverse pass")
    }
    changing = list(slopes(look, norms, sources))
    changing += slopes_of_steps(observed, norms)
    findings += (f for f in changing if (f.origin, f.scope) not in known)
    if any(f.cause == "vanishing" for f in findings):  # in the end that underflows: one problem
        for k, f in enumerate(findings):
            if f.cause == "underflow" and f.cure == CURES["vanishing"]:
                findings[k] = dataclasses.replace(f, problem=False)
    findings += changed_rules(observed)
    findings += _run_again(observed)
    return Explanation(
        name,
        tuple(reports),
        tuple(sorted(_merged(findings), key=lambda f: f.rank)),
        _output_text(observed.stats["output", None, 0]),
    )


def _run_again(observed: Observed) -> Iterator[Finding]:
    """Returns a finding for each operation with effects that ran more than once. The forward of a
    rule runs again for the reverse pass; everything runs again if more was measured later."""
    looked_twice = observed.detail > Detail.FEW
    for found in observed.graph.walk():
        node = found.node
        if not node.effects or found.rule_around is not None:
            continue
        is_rule = isinstance(node, CustomGradient)
        flows = any(ct is not None for ct in observed.of_results("ct", Place(found)))
        if flows if is_rule else looked_twice and not node.regions:
            yield Finding.of(
                found,
                "run again",
                f"{node.name} has effects, and to explain the gradient it was run more than once: "
                "the gradient itself runs it once",
                problem=False,
            )


def _looks_bad(observed: Observed) -> bool:
    """Whether a result or a gradient is not finite, or a norm overflows."""
    return any(
        not np.isfinite(stat[..., :LEAST]).all() or stat[..., NAN : INF + 1].any()
        for (kind, *_), stat in observed.stats.items()
        if kind in ("source", "output")
    )


def _has_gradient_of_zeros(observed: Observed) -> bool:
    return any(stat[ZEROS] >= 1 for (kind, *_), stat in observed.stats.items() if kind == "source")


def _reports(
    observed: Observed, sources: Mapping[str, int | None], findings: Sequence[Finding]
) -> list[SourceReport]:
    """Returns a report on each source; an unconnected one gets its reason from the findings."""
    avals = observed.graph.in_avals
    reports = []
    for path, i in sources.items():
        stat = None if i is None else observed.stats.get(("source", None, i))
        type_text = "" if i is None else _jax.type_text(avals[i])
        size = 0 if i is None else math.prod(avals[i].shape)
        if stat is None:
            reason = next((f.short for f in findings if path in f.sources), "")
            report = SourceReport(path, type_text, False, size=size, reason=reason)
        else:
            norm, zeros, nans, infs = map(float, stat[[NORM, ZEROS, NAN, INF]])
            report = SourceReport(path, type_text, True, norm, zeros, int(nans), int(infs), size)
        reports.append(report)
    return reports


def _merged(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Merges findings with the same cause and place: one for all sources, and for all operations
    there whose texts differ only in measured numbers."""
    groups: dict[Any, list[Finding]] = {}
    for finding in findings:
        what = finding.operation if finding.cause in _MEASURED else finding.what
        key = finding.cause, what, finding.origin, finding.step, finding.problem
        groups.setdefault(key, []).append(finding)
    for group in groups.values():
        sources = tuple(dict.fromkeys(path for f in group for path in f.sources))
        scope, others = shared_scope(f.scope for f in group), {f.what for f in group[1:]}
        what = group[0].what
        if others - {what}:
            other = "factors" if group[0].cause == "multiplied by zero" else "numbers"
            more = counted(len(group) - 1, "more operation")
            what += f"; the same in {more} there, with other {other}"
        yield dataclasses.replace(group[0], what=what, sources=sources, scope=scope)


def _output_text(stat: np.ndarray[Any, Any]) -> str:
    if stat[NAN] > 0:
        return "NaN"
    return number_text(float(stat[LEAST])) if stat[LEAST] == stat[GREATEST] else ""
