"""`explain_tape`: why a gradient of a tape is None, zero, NaN or not what it should be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.differentiation.gradient_types import type_of
from tracegrad.insight.explaining.cut_off import state_of_model
from tracegrad.insight.explaining.explain_graph import explain_graph, merged
from tracegrad.insight.explanation import Explanation, Finding, SourceReport
from tracegrad.ir.engine import engine
from tracegrad.tape.gradient_tape import GradientTape
from tracegrad.tape.leaves import seeds_for
from tracegrad.tape.record import Record, dependent_entries, results_without_residuals
from tracegrad.tape.sources import before_calls
from tracegrad.tape.under_rules import graph_of_entries
from tracegrad.tracing.leaves import Leaf, leaves_of
from tracegrad.variables.trees import is_variable, values_of
from tracegrad.variables.variable import Variable


def explain_tape(
    tape: GradientTape, target: Any, sources: Any, output_gradients: Any = None
) -> Explanation:
    """Explains why the gradients that a tape would return are what they are.

    It finds what `explain` finds, and the mistakes that only a tape allows: a source that the tape
    does not follow (an array that is not the object that was watched, a `Variable` that was not
    read while the tape recorded), a target that was computed outside of the block.

    Args:
      tape: a tape after its block; if it is not persistent, before `GradientTape.gradient` has used
        it up.
      target, sources, output_gradients: as for `GradientTape.gradient`.

    Returns:
      An `Explanation`. The path of a source is its path in the tree `sources`, the name of a
      `Variable`, or ``source``.

    Raises:
      RuntimeError: the tape has been used up.
      ValueError, TypeError: the output gradients do not fit, as for `GradientTape.gradient`.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> from tracegrad.insight import explain_tape
    >>> x = jnp.array([1.0, 2.0])
    >>> with tg.GradientTape(persistent=True) as tape:
    ...     tape.watch(x)
    ...     y = jnp.sum(x**2)
    >>> explain_tape(tape, y, jnp.array([1.0, 2.0])).findings[0].cause
    'not watched'
    """
    tape._check_usable()
    record = tape._record
    targets = jax.tree.leaves(values_of(target))
    seeds = [
        jnp.ones_like(array) if seed is None else seed  # the tape's default
        for array, seed in zip(targets, seeds_for(target, targets, output_gradients), strict=True)
    ]
    computed = {slot for entry in record.entries for slot in entry.results}
    # Sources that the tape did not compute are explained together; a source that the tape computed
    # is explained alone, since the gradient of another source may flow through it.
    together: dict[str, Any] = {}
    separate: list[dict[str, Any]] = []
    findings: list[Finding] = []
    reports: dict[str, SourceReport] = {}
    before, untrained = before_calls(record, sources), set[str]()
    for leaf, array in _named_sources(sources):
        path, array = leaf.name, before.get(id(array), array)
        reason = _why_not_followed(record, path, array)
        if not leaf.is_trained:
            untrained.add(path)
            reason = reason and state_of_model(path)
        if reason is not None:
            findings.append(reason)
            reports[path] = _report_on_unfollowed(path, array, reason)
            continue
        for i, read in enumerate(record.reads_of(array)):
            name = path if i == 0 else f"{path} (read {i + 1})"
            if record.slot(read) in computed:
                separate.append({name: read})
            else:
                together[name] = read
    value = ""
    for group in [together, *separate]:
        if group:
            found = _explain(record, group, targets, seeds, untrained)
            findings += found.findings
            reports.update((report.path, report) for report in found.sources)
            value = value or found.value
    ordered = tuple(sorted(merged(findings), key=lambda f: f.rank))
    return Explanation("the tape", tuple(reports.values()), ordered, value)


def _named_sources(sources: Any) -> list[tuple[Leaf, Any]]:
    """Returns the sources with their names, without a model's other leaves (functions, strings)."""
    named = []
    arrays = jax.tree.leaves(sources, is_leaf=is_variable)
    for leaf, array in zip(leaves_of(sources), arrays, strict=True):
        if is_variable(array):
            named.append((leaf._replace(name=_name_of(array, leaf.name)), array))
        elif not leaf.name or type_of(array) is not None:
            named.append((leaf._replace(name=leaf.name or "source"), array))
    return named


def _name_of(variable: Variable, path: str) -> str:
    """Returns the path of a Variable, extended or replaced by its name if the name says more."""
    name = str(variable.name)
    if not path or name == path or name.endswith(f".{path}"):
        return name
    return path if name == "Variable" else f"{path}.{name}"


def _report_on_unfollowed(path: str, leaf: Any, reason: Finding) -> SourceReport:
    array = leaf.value if isinstance(leaf, Variable) else leaf
    type_text = _jax.type_text(jax.typeof(array)) if isinstance(array, jax.Array) else ""
    return SourceReport(path, type_text, False, size=np.size(array), reason=reason.short)


# --------------------------------------------------------------------------------- what is followed


def _why_not_followed(record: Record, path: str, leaf: Any) -> Finding | None:
    """Returns the reason why a tape does not follow a source; None if it does."""
    if isinstance(leaf, Variable):
        what, is_followed = "the value of this Variable", bool(record.reads.get(leaf))
        cure = (
            "read it (`v.value`, `v * x`) while the tape records; if it is not trainable, or the "
            "tape has `watch_accessed_variables=False`, `tape.watch(v)` before that"
        )
    elif not isinstance(leaf, jax.Array) or not _jax.has_gradient(leaf):
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        return Finding("no gradient", f"it is {dtype}, which has no gradient", (path,))
    else:
        what, is_followed = "this object", id(leaf) in record.tracked
        cure = "`tape.watch(x)` inside the block, and use and ask for that very array, not a copy"
    words = (
        f"the tape does not follow {what}: a tape follows the array objects that it was told to "
        "watch or that it saw computed from them, and Variables that are read while it records"
    )
    return None if is_followed else Finding("not watched", words, (path,), cure=cure)


# ------------------------------------------------------------------------------ what was recorded


def _explain(
    record: Record,
    sources: dict[str, Any],
    targets: Sequence[Any],
    seeds: Sequence[Any],
    untrained: Collection[str],
) -> Explanation:
    """Explains the gradients of the program that leads from some sources to the targets."""
    slots = {path: record.slot(array) for path, array in sources.items()}
    arrays = record.arrays
    entries = dependent_entries(record.entries, slots.values())
    known = {slot for entry in entries for slot in (*entry.args, *entry.results)}
    known.update(slots.values())
    at = [record.tracked.get(id(target)) for target in targets]
    inside = [
        i
        for i, (target, slot) in enumerate(zip(targets, at, strict=True))
        if slot in known and _jax.has_gradient(target)
    ]
    used = {slot for entry in entries for slot in entry.args}
    ends = [
        slot
        for entry in entries
        for slot in results_without_residuals(entry)
        if slot not in used and not _jax.has_gradient(arrays[slot])
    ]
    outputs = [*(at[i] for i in inside), *ends]
    graph, given = graph_of_entries(entries, arrays, outputs, list(slots.values()))
    number = {slot: i for i, slot in enumerate(given)}
    return explain_graph(
        graph,
        [arrays[slot] for slot in given],
        {path: number[slot] for path, slot in slots.items()},
        [seeds[i] for i in inside] + [None] * len(ends),
        name="the tape",
        unselectable={},
        why_unused=None if inside else _why_unused(targets),
        untrained=untrained,
        ends=range(len(inside), len(outputs)),
    )


def _why_unused(targets: Sequence[Any]) -> str:
    exact = {str(target.dtype) for target in targets if not _jax.has_gradient(target)}
    if len(exact) == 1 and not any(map(_jax.has_gradient, targets)):
        return f"the target is of dtype {exact.pop()}, which has no gradient: make it a float"
    return (
        "the target was not computed from it inside the block, as far as the tape has seen. A tape "
        "does not see what is computed before the block, before `watch` or after the block, in "
        "`stop_recording`, in NumPy (`np.asarray(x)`, `float(x)`, a `numpy_function` without "
        "`grad=`), in other threads and in functions compiled ahead of time"
    )


engine.explain_tape = explain_tape
