"""What a record answers for sources: arrays, and Variables, each of which is all its reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tracegrad import _jax
from tracegrad.tape.backward import sum_of_known
from tracegrad.tape.cotangents import Kind, cotangents
from tracegrad.tape.record import Record
from tracegrad.variables.variable import Variable


def cotangents_of(
    record: Record,
    sources: Sequence[Any],
    targets: Sequence[Any],
    variables: Mapping[Variable, Any],
    kind: Kind,
    seeds: Sequence[Any],
) -> list[Any]:
    """The cotangents of sources; None for one that nothing connects to a target.

    Args:
      record: that of a tape.
      sources: arrays and Variables.
      targets: arrays.
      variables: the values of those Variables that are targets.
      kind, seeds: as of `cotangents`.
    """
    if not record.stand_ins and not any(isinstance(source, Variable) for source in sources):
        return _of_arrays(record, sources, targets, kind, seeds)
    # Each read of a Variable is a value of its own, the more so after an assignment.
    reads = [
        record.stands_for(_with(record.reads_of(source), variables.get(source)))
        if isinstance(source, Variable)
        else record.stands_for([source])
        for source in sources
    ]
    each = iter(_of_arrays(record, [a for of in reads for a in of], targets, kind, seeds))
    return [next(each) if len(of) == 1 else sum_of_known([next(each) for _ in of]) for of in reads]


def _with(reads: list[Any], value: Any) -> list[Any]:
    """What was read of a Variable, and the value that it has as a target."""
    is_new = value is not None and all(value is not read for read in reads)
    return [*reads, value] if is_new else reads


def _of_arrays(
    record: Record,
    sources: Sequence[Any],
    targets: Sequence[Any],
    kind: Kind,
    seeds: Sequence[Any],
) -> list[Any]:
    tracked = record.tracked
    # A source that is a target has its seed for a gradient, watched or not.
    ends = {id(target) for target in targets}
    from_sources: dict[int, int] = {}
    for source in sources:
        identity = id(source)
        if (identity in tracked or identity in ends) and _jax.has_gradient(source):
            from_sources[identity] = record.slot(source)
    inside = [i for i, t in enumerate(targets) if id(t) in tracked or id(t) in from_sources]
    if not inside or not from_sources:
        return [None] * len(sources)
    to_targets = tuple([record.slot(targets[i]) for i in inside])
    given = [seeds[i] for i in inside] if seeds else []
    found = cotangents(record, tuple(from_sources.values()), to_targets, kind, given)
    by_source = dict(zip(from_sources, found, strict=True))
    return [by_source.get(id(source)) for source in sources]
