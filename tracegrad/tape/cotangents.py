"""The reverse pass over a record: pulls cotangents back through its entries, the last entry first.

Each pull-back is a computation that runs under the current recorder, so outer tapes record it.
Derivatives of higher order need nothing else.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad._jax.caches import Cache
from tracegrad.differentiation.indexed_slices import is_slices
from tracegrad.differentiation.pull_back import Aggregation, explain_node, sum_present
from tracegrad.tape.computations import Computation, add_computation, compiled, trace_operation
from tracegrad.tape.record import Entry, Record, entries_between
from tracegrad.tape.recorded_rules import RecordedRule
from tracegrad.tape.recorder import Recorder
from tracegrad.tape.recorders import not_overridden
from tracegrad.tape.under_rules import vjp_under_rules
from tracegrad.tracing.in_force import rules_for_recorded, rules_in_force

RecordedPath = Sequence[tuple[Entry, tuple[int, ...]]]
# ``seeds of the targets -> cotangents of the sources``; None for an unconnected source.
Backward = Callable[[Sequence[Any]], list[Any]]


# ---------------------------------------------------------------------------- kinds of derivative


@dataclass(frozen=True, eq=False)
class Derivative:
    """A kind of derivative.

    Attributes:
      run: ``(backward, seeds, targets) -> derivatives of the sources``, by backward passes.
      zeros: ``(targets, source) -> zeros``, the derivative for an unconnected source.
      sparse: whether derivatives may be `IndexedSlices`.
    """

    run: Callable[[Backward, Sequence[Any], Sequence[Any]], list[Any]]
    zeros: Callable[[Sequence[Any], Any], Any]
    sparse: bool = False


def _run_gradient(backward: Backward, seeds: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
    filled = [_ones(t) if s is None else s for s, t in zip(seeds, targets, strict=True)]
    return backward(filled)


def _run_jacobian(backward: Backward, seeds: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
    (target,) = targets
    zeros = jnp.zeros_like(target)  # split over devices as the target
    stacked = _map_rows(lambda row: backward([row + zeros]), _basis(target.shape, target.dtype))
    return [None if ct is None else ct.reshape(*target.shape, *ct.shape[1:]) for ct in stacked]


def _run_batch_jacobian(
    backward: Backward, seeds: Sequence[Any], targets: Sequence[Any]
) -> list[Any]:
    (target,) = targets
    batch, *rest = target.shape
    zeros = jnp.zeros_like(target)
    # One row of the basis seeds all examples at once: no example depends on another example.
    stacked = _map_rows(
        lambda row: backward([jnp.broadcast_to(row, target.shape) + zeros]),
        _basis(rest, target.dtype),
    )
    return [
        None if ct is None else jnp.moveaxis(ct, 1, 0).reshape(batch, *rest, *ct.shape[2:])
        for ct in stacked
    ]


def _map_rows(fun: Callable[[Any], list[Any]], rows: Any) -> list[Any]:
    """Maps `fun` over the rows by `jax.vmap`; a result that is None stays None."""
    connected: list[int] = []
    count = 0

    def without_nones(row: Any) -> list[Any]:
        nonlocal count
        results = fun(row)
        count = len(results)
        connected[:] = [i for i, result in enumerate(results) if result is not None]
        return [results[i] for i in connected]

    stacked = dict(zip(connected, jax.vmap(without_nones)(rows), strict=True))
    return [stacked.get(i) for i in range(count)]


def _basis(shape: Sequence[int], dtype: Any) -> Any:
    """Returns all arrays that are 1 at one element and 0 elsewhere, along a new first axis."""
    size = math.prod(shape)
    return jnp.eye(size, dtype=dtype).reshape(size, *shape)


def _ones(target: Any) -> Any:
    return jnp.ones_like(target, target.dtype)


def _zeros(leading: Sequence[int], leaf: Any, skipped: int = 0) -> Any:
    return jnp.zeros((*leading, *leaf.shape[skipped:]), leaf.dtype)


GRADIENT = Derivative(_run_gradient, lambda targets, leaf: _jax.zeros_of(leaf.aval))
SPARSE_GRADIENT = replace(GRADIENT, sparse=True)
JACOBIAN = Derivative(_run_jacobian, lambda targets, leaf: _zeros(jnp.shape(targets[0]), leaf))
BATCH_JACOBIAN = Derivative(
    _run_batch_jacobian, lambda targets, leaf: _zeros(jnp.shape(targets[0]), leaf, skipped=1)
)


# ----------------------------------------------------------------------------------- the pass


def differentiate_record(
    record: Record,
    sources: Sequence[int],
    targets: Sequence[int],
    derivative: Derivative,
    seeds: Sequence[Any],
    stopped: Collection[int],
    aggregate: Aggregation | None,
    gated: bool,
) -> list[Any]:
    """Returns the derivative for each source; None for a source that is connected to no target.

    Args:
      record: the operations that have run.
      sources, targets: slots of arrays in the record.
      derivative: the kind of derivative to compute.
      seeds: the cotangent of each target (None: ones); empty for a Jacobian.
      stopped: slots that count as constants: no cotangent goes back through them.
      aggregate: adds the cotangents that reach one value; None: one after the other.
      gated: whether an XLA barrier releases the cotangents of an operation's operands together.
    """
    rule_sets = rules_in_force()
    rules = rules_for_recorded() if rule_sets else ()
    is_plain = derivative is GRADIENT and not (rules or stopped or aggregate or gated)
    is_debugging = jax.config.jax_debug_nans or jax.config.jax_disable_jit
    if is_plain and not is_debugging and _jax.is_top_level():
        compiled_pass = _get_compiled_pass(record, sources, targets, seeds)
        if compiled_pass is not None and (cts := compiled_pass(record.arrays, seeds)) is not None:
            return cts
    arrays = list(record.arrays)
    path = entries_between(record, sources, targets, stopped, follows_data=bool(rules))
    if rules:
        backward = vjp_under_rules(
            path, arrays, sources, targets, stopped, rules, record.variable_names
        )
    else:
        tables = _find_tables(path, sources) if derivative.sparse else set[int]()

        def backward(seeds: Sequence[Any]) -> list[Any]:
            terms_of: dict[int, list[Any]] = {}
            for slot, seed in zip(targets, seeds, strict=True):
                terms_of.setdefault(slot, []).append(seed)
            reverse_pass = _Pass(arrays, set(sources), stopped, tables, aggregate or _sum, gated)
            return reverse_pass.run(path, sources, terms_of)

    with not_overridden() if rule_sets else nullcontext():
        return derivative.run(backward, seeds, [arrays[slot] for slot in targets])


def _run_recorded(computation: Computation, operands: Sequence[Any]) -> Any:
    """Runs a computation; the current recorder, if any, records it for its tapes."""
    trace = _jax.current_trace(None)
    if isinstance(trace, Recorder):
        if computation.has_rules and trace.watching(computation.closed_over(operands)):
            return computation.run(*operands)  # the recorder makes the watched arrays operands
        return trace.apply(computation, operands, trace.watching(operands))
    is_staged = not isinstance(trace, _jax.TopLevelTrace) and _jax.staging_trace() is not None
    return (computation.inlined if is_staged else computation.run)(*operands)


def _sum(terms: Sequence[Any]) -> Any:
    total = terms[0]
    for term in terms[1:]:
        (total,) = _run_recorded(add_computation, [total, term])
    return total


@dataclass(frozen=True)
class _Pass:
    """One reverse pass.

    Attributes:
      arrays: the arrays of the record, by slot.
      sources: slots whose cotangents are results of the pass.
      tables: slots whose cotangents may be `IndexedSlices`.
      stopped, aggregate, gated: as for `differentiate_record`.
    """

    arrays: Sequence[Any] | Mapping[int, Any]
    sources: set[int]
    stopped: Collection[int] = frozenset()
    tables: Collection[int] = frozenset()
    aggregate: Aggregation = _sum
    gated: bool = False

    def run(
        self, path: RecordedPath, sources: Sequence[int], terms_of: dict[int, list[Any]]
    ) -> list[Any]:
        """Pulls cotangents back along a path; returns the cotangents of `sources`, or None.

        `terms_of`: for each slot, the cotangents to add up; at first, the seeds of the targets.
        """
        for entry, active in reversed(path):
            result_cts: dict[int, Any] = {}
            for k, slot in enumerate(entry.results):
                if slot in terms_of and slot not in self.stopped:
                    result_cts[k] = self._total(terms_of, slot)
                    if slot not in self.sources:
                        del terms_of[slot]  # frees the cotangent, which is not a result
            if not result_cts:
                continue
            try:
                results = self._pull_entry(entry, active, result_cts)
            except Exception as error:
                if not isinstance(entry.computation, RecordedRule):
                    _explain_error(error, entry, self.arrays)
                raise
            if self.gated and results:
                barrier: Callable[[Any], Any] = jax.lax.optimization_barrier
                results = barrier(results)
            for k, ct in results.items():
                terms_of.setdefault(entry.args[active[k]], []).append(ct)
        return [self._total(terms_of, slot) if slot in terms_of else None for slot in sources]

    def _total(self, terms_of: dict[int, list[Any]], slot: int) -> Any:
        terms = terms_of[slot]
        if len(terms) > 1:
            if any(map(is_slices, terms)):  # slices come in the order of their lookups
                terms = terms[::-1]
            terms_of[slot] = terms = [sum_present(terms, self.aggregate)]
        return terms[0]

    def _pull_entry(
        self, entry: Entry, active: tuple[int, ...], result_cts: Mapping[int, Any]
    ) -> dict[int, Any]:
        """Returns a dict from positions in `active` to the cotangents of these operands."""
        computation = entry.computation
        if self.tables and any(map(is_slices, result_cts.values())):
            if _is_cast(entry) and entry.args[0] in self.tables:
                table = jax.typeof(self.arrays[entry.args[0]])
                return {0: result_cts[0].shaped_as(table).astype(table.dtype)}
            result_cts = {k: ct.to_dense() if is_slices(ct) else ct for k, ct in result_cts.items()}
        if isinstance(computation, RecordedRule):
            dys = [result_cts.get(k) for k in range(len(entry.results))]
            sparse = tuple([slot in self.tables for slot in entry.args])
            operand_cts = computation.pull_back(dys, sparse)
            return {k: operand_cts[i] for k, i in enumerate(active) if operand_cts[i] is not None}
        if computation.has_effects and computation.count is None:
            computation.refuse_second_run(active, [self.arrays[s] for s in entry.args])
        sparse = tuple([entry.args[i] in self.tables for i in active])
        pull = computation.pull(active, tuple(result_cts), len(entry.args), sparse)
        needed = map(self.arrays.__getitem__, entry.needed)
        return dict(_run_recorded(pull, [*needed, *result_cts.values()]))


# ----------------------------------------------------------------------- compiling frequent passes

# Launching the program of an entry takes longer than running the program. So a pass that has run
# this many times is compiled as one program; compiling earlier would cost more than it ever saves.
_RUNS_TO_COMPILE = 8
_MAX_ENTRIES = 512  # XLA's compile time grows faster than linearly
_run_counts: Cache[int, int] = Cache(1 << 14)  # maps the hash of a pass's key to its number of runs
_compiled_passes: Cache[Any, _CompiledPass] = Cache(128)


def _get_compiled_pass(
    record: Record, sources: Sequence[int], targets: Sequence[int], seeds: Sequence[Any]
) -> _CompiledPass | None:
    """Returns None if the pass has not run often enough, or cannot be compiled."""
    key = (
        tuple([(e.computation.number, e.args, e.results) for e in record.entries]),
        tuple(record.without_gradient),
        sources,
        targets,
        tuple([seed is None for seed in seeds]),
    )
    known = _compiled_passes.get(key)
    if known is not None:
        return known
    runs = _run_counts.put(hash(key), 0) + 1
    _run_counts[hash(key)] = runs
    if runs % _RUNS_TO_COMPILE or len(record.entries) > _MAX_ENTRIES:
        return None
    path = entries_between(record, sources, targets)
    if not all(_may_be_compiled(entry.computation) for entry, _ in path):
        return None
    return _compiled_passes.put(key, _CompiledPass(path, sources, targets, key))


def _may_be_compiled(computation: Computation | RecordedRule) -> bool:
    """Whether a cached program may contain the pull-back of a computation."""
    if isinstance(computation, RecordedRule):
        return False
    return computation.is_kept and not computation.has_effects


class _CompiledPass:
    """The pass over a path as one compiled program.

    The pass holds weak references to the computations of the path, and leaves the cache when one of
    the computations is freed. A record that uses the pass keeps all these computations alive.
    """

    def __init__(
        self, path: RecordedPath, sources: Sequence[int], targets: Sequence[int], key: Any
    ):
        def forget(_: Any, programs: Cache[Any, _CompiledPass] = _compiled_passes) -> None:
            programs.pop(key, None)

        refs = {entry.computation: weakref.ref(entry.computation, forget) for entry, _ in path}
        steps = [(refs[entry.computation], entry[1:], active) for entry, active in path]
        needed = dict.fromkeys(targets)
        for entry, _ in path:
            needed.update(dict.fromkeys(entry.needed))
        self._needed = tuple(needed)

        def backward(operands: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
            arrays = dict(zip(needed, operands, strict=True))
            path = [(Entry(cast(Computation, ref()), *rest), at) for ref, rest, at in steps]
            start: dict[int, list[Any]] = {}
            for slot, seed in zip(targets, seeds, strict=True):
                seed = jnp.ones_like(arrays[slot]) if seed is None else seed
                start.setdefault(slot, []).append(seed)
            return _Pass(arrays, set(sources)).run(path, sources, start)

        self._run = jax.jit(backward)

    def __call__(self, arrays: Sequence[Any], seeds: Sequence[Any]) -> list[Any] | None:
        """Returns None if the arrays are on different devices."""
        operands = [arrays[slot] for slot in self._needed]
        try:
            cts: list[Any] = self._run(operands, seeds)
        except ValueError:
            if not _are_on_different_devices([*operands, *seeds]):
                raise
            return None
        return cts


def _are_on_different_devices(arrays: Sequence[Any]) -> bool:
    """Whether arrays are committed to different devices: JAX compiles no program for them."""
    committed = [array for array in arrays if getattr(array, "committed", False)]
    return len({frozenset(array.sharding.device_set) for array in committed}) > 1


def _find_tables(path: RecordedPath, sources: Sequence[int]) -> set[int]:
    """Returns the slots whose cotangents may be slices: sources, and their casts and copies."""
    tables = set(sources)
    for entry, _ in path:
        if _is_cast(entry) and entry.args[0] in tables:
            tables.update(entry.results)
    return tables


def _is_cast(entry: Entry) -> bool:
    primitive = getattr(entry.computation, "primitive", None)
    return primitive is not None and primitive.name in ("convert_element_type", "copy")


def _explain_error(
    error: Exception, entry: Entry, arrays: Sequence[Any] | Mapping[int, Any]
) -> None:
    """Adds to an error the user's line of the operation that failed, and the cure."""
    computation, info = cast(Computation, entry.computation), entry.source_info
    types = [jax.typeof(arrays[slot]) for slot in entry.args]
    graph = whole = trace_operation(computation.called, types, info)
    if len(graph.nodes) != 1:  # a pull-back, in which several operations run
        whole = trace_operation(compiled(computation.called, computation.name), types, info)
    (node,) = whole.nodes
    explain_node(error, node, lambda: graph)
