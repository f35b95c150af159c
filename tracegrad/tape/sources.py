"""What a record answers for sources: arrays, and Variables, each of which is all its reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
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
    # Each read of a Variable is a value of its own, the more so after an assignment.
    arrays = [record.reads_of(source) for source in sources]
    if variables:
        arrays = [_with_target(variables, source, of) for source, of in zip(sources, arrays)]
    if record.stand_ins:
        arrays = [record.stands_for(of) for of in arrays]
    found = _of_arrays(record, list(chain(*arrays)), targets, kind, seeds)
    if set(map(len, arrays)) == {1}:  # as most are
        return found
    each = iter(found)
    return [sum_of_known(list(islice(each, len(of)))) for of in arrays]


def _with_target(variables: Mapping[Variable, Any], source: Any, reads: list[Any]) -> list[Any]:
    """What was read of a source, and the value that a Variable has as a target."""
    value = variables.get(source) if isinstance(source, Variable) else None
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
    if len(from_sources) == len(sources):  # each once
        return found
    by_source = dict(zip(from_sources, found, strict=True))
    return [by_source.get(id(source)) for source in sources]
