"""`gradients(ys, xs)`: symbolic gradients inside a traced function, in TensorFlow 1's manner.

No tape is opened: any value that the function has computed so far may be a y or an x. For that the
function is traced once more with everything recorded, as soon as it first calls `gradients`.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.gradient_types import as_inexact
from tracegrad.differentiation.indexed_slices import is_slices
from tracegrad.differentiation.pull_back import (
    Aggregation,
    running_sum,
    sum_of_known,
    tree_sum,
)
from tracegrad.tape.backward import seeds_for
from tracegrad.tape.block import on_the_way
from tracegrad.tape.cotangents import GRADIENT, JACOBIAN, SPARSE_GRADIENT, Derivative, cotangents
from tracegrad.tape.leaves import UnconnectedGradients, require_arrays
from tracegrad.tape.lost_gradients import warn_of_lost
from tracegrad.tape.record import Record
from tracegrad.tape.recorders import recorder_around, recorder_here
from tracegrad.tracing.attempts import trace_again, tracing_depth
from tracegrad.variables.listening import Listener, listening
from tracegrad.variables.statics import is_variable
from tracegrad.variables.variable import Variable


class AggregationMethod(enum.Enum):
    """How the gradients that reach one value on several ways are added up: always to the same sum.

    ``ADD_N`` (the default) and ``EXPERIMENTAL_ACCUMULATE_N`` add one after the other,
    ``EXPERIMENTAL_TREE`` pairwise, so that terms are freed early.

    >>> import tracegrad as tg
    >>> f = tg.trace(lambda x: tg.gradients(
    ...     x * x + x, x, aggregation_method=tg.AggregationMethod.EXPERIMENTAL_TREE)[0])
    >>> print(f(3.0))
    7.0
    """

    ADD_N = "add_n"
    DEFAULT = ADD_N
    EXPERIMENTAL_TREE = "tree"
    EXPERIMENTAL_ACCUMULATE_N = "accumulate_n"


_SUMS: dict[AggregationMethod, Aggregation] = {
    AggregationMethod.ADD_N: running_sum,
    AggregationMethod.EXPERIMENTAL_TREE: tree_sum,
    AggregationMethod.EXPERIMENTAL_ACCUMULATE_N: running_sum,
}


class _Everything(Record, Listener):
    """A record that watches every value of the function that is being traced.

    Attributes:
      trace: JAX's, of that function.
      depth: its `tracing_depth`.
    """

    trace: Any
    depth: int

    def tracks(self, arrays: Iterable[Any]) -> bool:
        return any(isinstance(array, jax.core.Tracer) for array in arrays)

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        value = outside()
        self.watch_read(variable, value)
        return value


class _Recording(threading.local):
    def __init__(self) -> None:
        # Of the functions that are being traced with a record, by depth.
        self.records: dict[int, _Everything] = {}


_recording = _Recording()


@contextmanager
def _recording_everything() -> Iterator[None]:
    recorder, record, depth = recorder_here(), _Everything(orders=2), tracing_depth()
    recorder.add(record)
    _recording.records[depth] = record
    record.trace, record.depth = recorder.parent_trace, depth
    try:
        with listening(record):
            yield
    finally:
        del _recording.records[depth]
        recorder.remove(record)


def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    name: str = "gradients",
    colocate_gradients_with_ops: bool = False,
    gate_gradients: bool = False,
    aggregation_method: AggregationMethod | None = None,
    stop_gradients: Any = None,
    unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
    sparse: bool = False,
) -> list[Any]:
    """The gradients of the sum of ``ys`` with respect to each of ``xs``.

    For use inside a function compiled by `tracegrad.trace` (there any value computed so far may be
    a y or an x), or inside a `GradientTape` (there: what the tape follows). Complex numbers follow
    JAX's convention (the conjugate of TensorFlow's).

    Args:
      ys: an array, or a list of them.
      xs: an array or a `Variable`, or a list of them: arguments, or values computed on the way to
        the ys. Of a Variable: the gradients of all that was read of it, before assignments and
        after, are summed.
      grad_ys: for each y what its gradient starts from, of its shape and dtype, or
        `IndexedSlices` of one; None: ones.
      name: the named scope of the backward operations.
      colocate_gradients_with_ops: give each gradient the sharding of the value it belongs to.
      gate_gradients: release the gradients that one operation hands to its several inputs
        together.
      aggregation_method: how gradients that meet are added up; see `AggregationMethod`.
      stop_gradients: an array or a tree of arrays that count as constants: the derivatives are
        partial.
      unconnected_gradients: ``NONE``, or ``ZERO`` for zeros of the x's shape.
      sparse: whether a table that is only used through lookups by axis 0 (``table[ids]``,
        `jax.numpy.take`) gets `IndexedSlices`: one slice for each lookup.

    Returns:
      A list with one gradient for each x, of its shape and dtype, or None if nothing connects it.

    Raises:
      RuntimeError: outside of a traced function and of a tape.
      ValueError: ``grad_ys`` of another length or shape, an unknown aggregation method or
        `unconnected_gradients`.
      TypeError: a y or an x that is no array and no Variable; ``grad_ys`` of another dtype, or a
        complex y without one.

    As ``tf.gradients``.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> @tg.trace
    ... def f(a):
    ...     c = 2 * a
    ...     y = a + c
    ...     return tg.gradients(y, [a, c]) + tg.gradients(y, [a, c], stop_gradients=[a, c])
    >>> print([float(g) for g in f(1.0)])
    [3.0, 1.0, 1.0, 1.0]
    """
    unconnected = UnconnectedGradients(unconnected_gradients)
    require_arrays("y", ys, _list(ys))
    require_arrays("x", xs, _list(xs))
    targets, sources = _values(ys), _list(xs)
    sums = _SUMS.get(aggregation_method or AggregationMethod.DEFAULT)
    if sums is None:
        known = ", ".join(method.name for method in AggregationMethod)
        raise ValueError(f"unknown aggregation method {aggregation_method!r}; there are {known}")
    seeds = [
        jnp.ones_like(target) if seed is None else seed
        for target, seed in zip(targets, seeds_for(targets, grad_ys), strict=True)
    ]
    record = _record_here(_values(sources))
    reads = [_reads(record, x, targets) for x in sources]
    constants = jax.tree.leaves(stop_gradients, is_leaf=is_variable)
    stops = [array for x in constants for array in _reads(record, x, targets)]
    each = [array for of in reads for array in of]
    with jax.named_scope(name):
        kind = SPARSE_GRADIENT if sparse else GRADIENT
        terms = iter(_pull_back(record, targets, each, kind, seeds, stops, sums, gate_gradients))
        found = [sum_of_known([next(terms) for _ in of], sums) for of in reads]
        if colocate_gradients_with_ops:
            found = [_colocated(g, of[-1]) for g, of in zip(found, reads, strict=True)]
        if unconnected is UnconnectedGradients.ZERO:
            found = [
                jnp.zeros(x.shape, x.dtype) if g is None else g
                for g, x in zip(found, sources, strict=True)
            ]
    return found


def hessians(ys: Any, xs: Any, **options: Any) -> list[Any]:
    """The second derivatives of the sum of ``ys`` with respect to each of ``xs``: diagonal blocks.

    Args:
      ys, xs: as for `gradients`.
      **options: further arguments of `gradients`.

    Returns:
      For each x an array of the shape ``x.shape + x.shape``; zeros where nothing connects.

    As ``tf.hessians``.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> f = tg.trace(lambda x: tg.hessians(jnp.sum(x**3), x)[0])
    >>> print(f(jnp.array([1.0, 2.0])))
    [[ 6.  0.]
     [ 0. 12.]]
    """
    return [_hessian(ys, x, options) for x in _list(xs)]


def _hessian(ys: Any, x: Any, options: dict[str, Any]) -> Any:
    (first,) = gradients(ys, x, **{**options, "unconnected_gradients": "zero", "sparse": False})
    record = _record_here(_values(x))
    total = sum_of_known(_pull_back(record, [first], _reads(record, x, [first]), JACOBIAN))
    return jnp.zeros((*x.shape, *x.shape), x.dtype) if total is None else total


def hessian_vector_product(ys: Any, xs: Any, v: Any) -> list[Any]:
    """The Hessian of the sum of ``ys`` in all ``xs`` together, times a vector.

    Args:
      ys, xs: as for `gradients`.
      v: one array (or number) for each x, of its shape and dtype; a constant.

    Returns:
      One array for each x, of its shape; None for an x that nothing connects.

    Raises ValueError for another number of arrays in `v`.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> f = tg.trace(lambda x, v: tg.hessian_vector_product(jnp.sum(x**3), x, v)[0])
    >>> print(f(jnp.array([1.0, 2.0]), jnp.array([1.0, 1.0])))
    [ 6. 12.]
    """
    sources, vectors = _list(xs), _values(v)
    if len(sources) != len(vectors):
        raise ValueError(f"{len(vectors)} arrays in v for {len(sources)} xs: give one for each")
    firsts = gradients(ys, sources)
    pairs = [
        (first, jax.lax.stop_gradient(as_inexact(vector, first.dtype)))
        for first, vector in zip(firsts, vectors, strict=True)
        if first is not None
    ]
    if not pairs:
        return [None] * len(sources)
    return gradients([first for first, _ in pairs], sources, [vector for _, vector in pairs])


# ------------------------------------------------------------------------------------------ parts


def _list(values: Any) -> list[Any]:
    if values is None:
        return []
    return list(values) if isinstance(values, list | tuple) else [values]


def _values(values: Any) -> list[Any]:
    """The arrays of a list; of a Variable its value now."""
    return [v.value if isinstance(v, Variable) else v for v in _list(values)]


def _reads(record: Record, x: Any, targets: Sequence[Any] = ()) -> list[Any]:
    """The arrays that an x stands for. A Variable is all its reads: each is a value of its own, and
    some may be by enclosing functions, of which the targets use values."""
    own = record.stands_for(record.reads_of(x) or _values(x))
    used = _used_from_around(record, targets) if isinstance(x, Variable) else []
    return [*own, *_reads(_enclosing(record), x, used)] if used else own


def _record_here(sources: Sequence[Any]) -> Record:
    recorder = recorder_around()
    if recorder is not None and recorder.records:
        following = [r for r in recorder.records if r.tracks(sources)]
        record = (following or recorder.records)[-1]
        record.hand_out()
        return record
    depth = tracing_depth()
    if depth and depth not in _recording.records:
        trace_again(_recording_everything, depth)
    disabled = (
        " Under `jax.disable_jit` tracegrad.trace compiles nothing."
        if _jax.config.jax_disable_jit
        else ""
    )
    raise RuntimeError(
        "gradients() reads what a function has computed so far: call it inside a function that "
        "tracegrad.trace compiles (not in the body of a scan, cond or jit in it), or inside a "
        "GradientTape. For the gradient of a function use tracegrad.grad." + disabled
    )


def _pull_back(
    record: Record,
    targets: Sequence[Any],
    sources: Sequence[Any],
    kind: Derivative,
    seeds: Sequence[Any] = (),
    stops: Sequence[Any] = (),
    *how: Any,
) -> list[Any]:
    """The cotangents of sources; None for one that nothing connects to a target."""
    around = _ways_around(record, targets, sources, stops)
    if not around:
        return _pull_back_here(record, targets, sources, kind, seeds, stops, *how)
    if kind is JACOBIAN:
        raise NotImplementedError(
            "an x is a value of an enclosing traced function, and so are further values that the "
            "ys depend on: ask for these second derivatives there"
        )
    enclosing = _enclosing(record)
    # What is used here of the values around is pulled back through what has computed them there.
    is_outer = [_is_from_around(record, x) for x in sources]
    inner = [x for x, outer in zip(sources, is_outer, strict=True) if not outer]
    here = _pull_back_here(record, targets, [*inner, *around], GRADIENT, seeds, stops, *how)
    arrived = [(x, ct) for x, ct in zip(around, here[len(inner) :], strict=True) if ct is not None]
    there = _pull_back(
        enclosing,
        [x for x, _ in arrived],
        [x for x, outer in zip(sources, is_outer, strict=True) if outer],
        GRADIENT,
        [ct for _, ct in arrived],
        stops,
        *how,
    )
    each = iter(here), iter(there)
    return [next(each[outer]) for outer in is_outer]


def _pull_back_here(
    record: Record,
    targets: Sequence[Any],
    sources: Sequence[Any],
    kind: Derivative,
    seeds: Sequence[Any] = (),
    stops: Sequence[Any] = (),
    aggregate: Aggregation = running_sum,
    gated: bool = False,
) -> list[Any]:
    """The same by way of what the function itself computes, or what a tape follows."""
    stopped = frozenset(record.slots[id(array)] for array in stops if id(array) in record.slots)
    ends = tuple(map(record.slot, sources)), tuple(map(record.slot, targets))
    record.refuse_to_stop(stopped, ends[1])
    warn_of_lost(record, sources, targets)
    recorder = recorder_around()
    inline = recorder is None or not recorder.is_top
    return cotangents(record, *ends, kind, seeds, stopped, aggregate, gated, inline)


def _ways_around(
    record: Record, targets: Sequence[Any], sources: Sequence[Any], stops: Sequence[Any]
) -> list[Any]:
    """The values of enclosing functions by which targets may be connected to sources that are such
    values too; none if there is just one, used and asked for."""
    given = {id(x) for x in sources if _is_from_around(record, x)}
    if not given:
        return []
    stopped = set(map(id, stops)) - given
    found = [array for array in _used_from_around(record, targets) if id(array) not in stopped]
    return found if len(given.union(map(id, found))) > 1 else []


def _used_from_around(record: Record, targets: Sequence[Any]) -> list[Any]:
    """The values of enclosing functions from which some of the targets may be computed."""
    if not isinstance(record, _Everything) or record.depth == 1:
        return []
    ends = tuple(map(record.slot, targets))
    operations, types = record.operations(), record.types()
    around = [i for i, array in enumerate(record.arrays) if _is_from_around(record, array)]
    used = {
        slot for i in on_the_way(operations, types, around, ends) for slot in operations[i].args
    }
    return [record.arrays[slot] for slot in used.union(ends).intersection(around)]


def _is_from_around(record: Record, array: Any) -> bool:
    if not isinstance(record, _Everything) or record.depth == 1:
        return False
    is_traced = _jax.is_tracer(array) and _jax.has_gradient(array)
    return is_traced and _jax.trace_of(array) is not record.trace


def _enclosing(record: Record) -> _Everything:
    """The record of the function that is being traced around the one of a record."""
    assert isinstance(record, _Everything)
    found = _recording.records.get(record.depth - 1)
    if found is None:
        trace_again(_recording_everything, record.depth - 1)
    found.hand_out()
    return found


def _colocated(gradient: Any, value: Any) -> Any:
    sharding = getattr(jax.typeof(value), "sharding", None)
    if is_slices(gradient) or gradient is None or sharding is None or sharding.mesh.empty:
        return gradient
    constrain: Callable[[Any, Any], Any] = jax.lax.with_sharding_constraint
    return constrain(gradient, sharding)
