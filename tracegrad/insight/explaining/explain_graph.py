"""Explains a graph: measures what flows in it, and asks every question of what was measured."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.connectivity import connections
from tracegrad.differentiation.smallest_cuts import CutsOnWay, smallest_cuts
from tracegrad.insight.explaining.custom_rules import changed_rules
from tracegrad.insight.explaining.cut_off import cut_off, no_gradient, refusals, state_of_model
from tracegrad.insight.explaining.measuring import MeasuredPass
from tracegrad.insight.explaining.not_finite import not_finite
from tracegrad.insight.explaining.observed import Observed
from tracegrad.insight.explaining.slopes import scope_norms, slopes
from tracegrad.insight.explaining.statistics import GREATEST, INF, LEAST, NAN, NORM, ZEROS
from tracegrad.insight.explaining.visits import is_called
from tracegrad.insight.explaining.zeros import dead_units, zero_gradients
from tracegrad.insight.explanation import Explanation, Finding, SourceReport, number_text
from tracegrad.ir import CustomGradient, Graph
from tracegrad.ir.authors import is_jaxs_rule
from tracegrad.ir.program_keys import PROGRAMS, program_key, rule_key

# To compile a pass takes as long as to run it some ten times operation by operation.
_OFTEN = 8
# What such a run may hold: it frees less on its way than XLA does.
_IN_MEMORY = 1 << 30
# Compiling is most of what a compiled one costs, too. (Optimised still less it compiles no faster,
# and each further call takes twice its time.)
_QUICK = {"xla_llvm_disable_expensive_passes": True}

# Of the inputs of a graph and the cotangents of its outputs (or None) what was observed in it.
Look = Callable[[Sequence[Any], Sequence[Any]], Observed]


def explain_graph(
    program: Graph,
    inputs: Sequence[Any],
    sources: dict[str, int | None],
    seeds: Sequence[Any],
    *,
    name: str,
    unselectable: dict[str, Any],
    why_unused: str | None = None,
    others: Mapping[int, str] = MappingProxyType({}),
    untrained: Collection[str] = (),
    updated: Collection[str] = (),
    ends: Sequence[int] = (),
) -> Explanation:
    """Explains the gradients of a graph.

    Args:
      program: the graph.
      inputs: the arrays of its inputs.
      sources: by path which input a source is; None for what is of no differentiable type.
      seeds: for each output of the graph a cotangent, or None.
      name: of the function.
      unselectable: the sources without an input.
      why_unused: words for sources that nothing leads from to the result, if there are better
        ones than that.
      others: the names of inputs that are no sources.
      untrained: the sources of which nobody expects that they get a gradient.
      updated: those of which the function computes new values beside its result.
      ends: outputs without a gradient; what leads to these alone is cut off where they are made.
    """
    targets = [i for i, seed in enumerate(seeds) if seed is not None]
    known = _Known(program)
    reached = _connected(program, targets, known)
    findings: list[Finding] = []
    flowing = [False] * len(program.inputs)
    cuts: list[CutsOnWay | None] = []
    for path, i in sources.items():
        if i is not None and i in reached:
            flowing[i] = True
        elif path in untrained:
            findings.append(state_of_model(path))
        elif i is None:
            findings.append(no_gradient(path, unselectable[path]))
        else:
            cuts = cuts or _cuts(program, targets, ends)
            if path in updated and cuts[i] is None:
                findings.append(state_of_model(path))
            else:
                tied = [p for p, j in sources.items() if j in reached and inputs[j] is inputs[i]]
                why = f"nothing uses it by this path; {tied[0]} is the same array" if tied else None
                findings += cut_off(program, inputs, path, i, cuts[i], why_unused or why)
    observed = _measure(program, flowing, inputs, seeds, known, close=False)
    findings += refusals(observed)

    @functools.cache
    def close() -> Observed:
        return _measure(program, flowing, inputs, seeds, known, close=True)

    if _looks_bad(observed):
        observed = close()
        findings += not_finite(observed, sources, targets, others)
    reports = _reports(observed, sources, findings)
    norms = {r.path: r.norm for r in reports if r.connected and math.isfinite(r.norm)}
    findings += zero_gradients(observed, close, reports, sources, inputs)
    findings += slopes(observed, norms, sources)
    findings += changed_rules(observed)
    findings += dead_units(observed, targets, findings)
    value = observed.stats.get(("output", None, targets[0])) if targets else None
    return Explanation(
        name,
        tuple(reports),
        tuple(sorted(merged(findings), key=lambda f: f.rank)),
        tuple(scope_norms(observed)),
        "" if value is None else _output_text(value),
    )


def _connected(program: Graph, targets: Sequence[int], known: _Known) -> frozenset[int]:
    """The inputs that something connects with the targets."""

    def find() -> frozenset[int]:
        linked = connections(program)
        return frozenset[int]().union(*(linked[t] for t in targets))

    return known.or_made(("connections", tuple(targets)), find)


def _cuts(program: Graph, targets: Sequence[int], ends: Sequence[int]) -> list[CutsOnWay | None]:
    """For every input its smallest cuts on the way to a target; if none leads there, to an end."""
    cuts = smallest_cuts(program, targets)
    if not ends:
        return cuts
    further = smallest_cuts(program, ends)
    return [b if a is None else a for a, b in zip(cuts, further, strict=True)]


def _measure(
    program: Graph,
    sources: Sequence[bool],
    inputs: Sequence[Any],
    seeds: Sequence[Any],
    known: _Known,
    *,
    close: bool,
) -> Observed:
    seeded = tuple(seed is not None for seed in seeds)
    key = tuple(sources), seeded, close
    look = known.or_made(key, lambda: _make_pass(program, sources, close))
    return look(list(inputs), list(seeds)).in_graph(program)


def _make_pass(graph: Graph, sources: Sequence[bool], close: bool) -> Look:
    """Runs the passes operation by operation, and once that was often as one compiled program.

    Statistics of one shape leave that as one array: there are some thousand, and each array costs
    more than the numbers in it.
    """
    measured = MeasuredPass(graph, sources, close)
    # Up close, as one program it would be the largest of all, for a single run.
    runs = math.inf if close else _OFTEN if _is_straight(graph) else 0
    looks = itertools.count()
    # It is remembered, and holds what it finds while it runs or is traced. (What runs may explain.)
    one_at_a_time = threading.RLock()

    @functools.partial(jax.jit, compiler_options=_QUICK)
    def stacked(args: Sequence[Any], seeds: Sequence[Any]) -> dict[tuple[int, ...], Any]:
        found = measured.run(args, seeds)
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, stat in found.items():
            alike.setdefault(stat.shape, []).append(number)
        return {tuple(group): jnp.stack([found[n] for n in group]) for group in alike.values()}

    def look(args: Sequence[Any], seeds: Sequence[Any]) -> Observed:
        # With JAX's own checks on it would raise where its work begins.
        with one_at_a_time, jax.debug_nans(False), jax.debug_infs(False):
            if next(looks) < runs:
                measured.lines.clear()
                found = jax.device_get(measured.run(args, seeds))
            else:
                stacks = jax.device_get(stacked(args, seeds)).items()
                found = {n: stat for group, stack in stacks for n, stat in zip(group, stack)}
            keys = measured.keys
            stats = {keys[number]: found[number] for number in sorted(found)}
            return Observed(graph, stats, dict(measured.refused), dict(measured.lines))

    return look


def _is_straight(graph: Graph) -> bool:
    """Whether it is nothing but operations, each of which JAX compiles once for its shapes and
    knows again (a loop it would compile for each run), and all their results have room."""
    for node in (node for each in graph.regions_below for node in each.nodes):
        is_rule = isinstance(node, CustomGradient)
        if node.has_references or (node.regions and not (is_rule or is_called(node))):
            return False
    results = (value.aval for o in graph.walk() for value in o.node.outputs)
    held: int = sum(aval.size * aval.dtype.itemsize for aval in results if hasattr(aval, "size"))
    return held <= _IN_MEMORY


def _looks_bad(observed: Observed) -> bool:
    """Whether a result or a gradient is not finite (or a norm overflows)."""
    return any(
        not np.isfinite(stat[..., :LEAST]).all() or stat[..., NAN : INF + 1].any()
        for (kind, *_), stat in observed.stats.items()
        if kind in ("source", "output")
    )


def _reports(
    observed: Observed, sources: Mapping[str, int | None], findings: Sequence[Finding]
) -> list[SourceReport]:
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
            zeros = float(stat[ZEROS]) / size if size else 0.0
            norm, nans, infs = float(stat[NORM]), int(stat[NAN]), int(stat[INF])
            report = SourceReport(path, type_text, True, norm, zeros, nans, infs, size)
        reports.append(report)
    return reports


def merged(findings: Sequence[Finding]) -> Iterator[Finding]:
    """One finding for all sources that one place concerns."""
    groups: dict[Any, list[Finding]] = {}
    for finding in findings:
        key = finding.cause, finding.what, finding.origin, finding.step
        groups.setdefault(key, []).append(finding)
    for group in groups.values():
        sources = tuple(dict.fromkeys(path for f in group for path in f.sources))
        yield dataclasses.replace(group[0], sources=sources)


def _output_text(stat: np.ndarray[Any, Any]) -> str:
    if stat[NAN] > 0:
        return "NaN"
    return number_text(float(stat[LEAST])) if stat[LEAST] == stat[GREATEST] else ""


# ------------------------------------------------------------------- programs that were seen before


T = TypeVar("T")


class _Known:
    """What was made before for graphs of the same program; a recorded one is like no other.

    To explain twelve layers once more takes 10 ms with it and 670 ms without.
    """

    def __init__(self, program: Graph):
        self.key = None if program.program is None else key_of(program)

    def or_made(self, of: Hashable, make: Callable[[], T]) -> T:
        if self.key is None:
            return make()
        key = "explained", self.key, of
        known: T | None = PROGRAMS.get(key)
        return PROGRAMS.put(key, make()) if known is None else known


def key_of(program: Graph) -> Hashable:
    """Equal for programs that compute the same with the same derivatives.

    JAX makes the functions of a custom rule anew whenever it traces a call, so that by these no
    program with a rule would be known again; what a rule says is in what it traces to.
    """
    nodes = (o.node for o in program.walk() if isinstance(o.node, CustomGradient))
    rules = tuple(map(_rule_key, dict.fromkeys(nodes)))
    return program_key(program.program), rules


def _rule_key(node: CustomGradient) -> Hashable:
    if is_jaxs_rule(node):
        return node.primal.function_source
    try:
        key: Hashable = rule_key(node)
    except Exception:  # it cannot be traced by itself: then it is like no other
        return object()
    return key
