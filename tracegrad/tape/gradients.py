"""`gradients(ys, xs)`: symbolic gradients inside a traced function, as in TensorFlow 1.

Users open no tape: any value that the function has computed so far may be a y or an x. So the first
call of `gradients` traces the function again, with all operations recorded.
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
from tracegrad.differentiation.pull_back import Aggregation, running_sum, sum_present, tree_sum
from tracegrad.tape.cotangents import GRADIENT, JACOBIAN, SPARSE_GRADIENT
from tracegrad.tape.leaves import Unconnected, UnconnectedGradients, require_arrays, seeds_for
from tracegrad.tape.record import Record, entries_between
from tracegrad.tape.recorders import recorder_around, recorder_here
from tracegrad.tape.sources import differentiate_arrays, warn_of_unwatched
from tracegrad.tracing.attempts import trace_again, tracing_depth
from tracegrad.tracing.leaves import leaves_of
from tracegrad.tracing.statics import is_none
from tracegrad.variables.listening import Listener, listening
from tracegrad.variables.trees import is_variable
from tracegrad.variables.variable import Variable


class AggregationMethod(enum.Enum):
    """The order in which gradients that reach one value by several paths are added.

    ``ADD_N`` (the default) and ``EXPERIMENTAL_ACCUMULATE_N`` add them one after the other,
    ``EXPERIMENTAL_TREE`` adds them in pairs, so that terms are freed early. The sum is the same.

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


class _FullRecord(Record, Listener):
    """A record that watches every value of a function that is being traced.

    Attributes:
      trace: the JAX trace of that function.
      depth: the `tracing_depth` of that function.
    """

    trace: Any
    depth: int

    def follows(self, array: Any) -> bool:
        return True

    def was_used_unfollowed(self, array: Any) -> bool:
        return False

    def note_use(self, arrays: Iterable[Any]) -> bool:
        return any(isinstance(array, jax.core.Tracer) for array in arrays)

    def active(self, operands: Sequence[Any]) -> tuple[int, ...]:
        return tuple(
            i for i, x in enumerate(operands) if _jax.is_tracer(x) and _jax.has_gradient(x)
        )

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        value = outside()
        self.watch_read(variable, value)
        return value


class _FullRecords(threading.local):
    def __init__(self) -> None:
        # By the `tracing_depth` of a function that is being traced: its full record.
        self.records: dict[int, _FullRecord] = {}


_full_records = _FullRecords()


@contextmanager
def _recording_everything() -> Iterator[None]:
    """A block that records all operations of the function that is being traced."""
    recorder, record, depth = recorder_here(), _FullRecord(orders=2), tracing_depth()
    recorder.add(record)
    _full_records.records[depth] = record
    record.trace, record.depth = recorder.parent_trace, depth
    try:
        with listening(record):
            yield
    finally:
        del _full_records.records[depth]
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
    unconnected_gradients: Unconnected = UnconnectedGradients.NONE,
    sparse: bool = False,
) -> list[Any]:
    """Returns the gradients of the sum of ``ys`` with respect to each of ``xs``.

    Call it inside a function compiled by `tracegrad.trace`, where any value computed so far may be
    a y or an x, or inside a `GradientTape`, where any array that the tape follows may be one.
    Complex numbers follow JAX's convention (the conjugate of TensorFlow's).

    Args:
      ys: an array, or a list of arrays.
      xs: an array or a `Variable`, or a list of these: arguments, or intermediate values that the
        ys depend on. The gradient of a Variable is the sum over all reads, before and after
        assignments.
      grad_ys: the cotangent of each y, an array (or `IndexedSlices`) with the shape and dtype of
        the y; None means ones.
      name: the named scope of the backward operations.
      colocate_gradients_with_ops: give each gradient the sharding of its x.
      gate_gradients: use the gradients of one operation's inputs only after all of them have been
        computed.
      aggregation_method: how gradients that reach one value are added; see `AggregationMethod`.
      stop_gradients: an array or a tree of arrays to treat as constants, which gives partial
        derivatives.
      unconnected_gradients: ``NONE``, or ``ZERO`` for zeros of the x's shape.
      sparse: whether a table that is only used through lookups by axis 0 (``table[ids]``,
        `jax.numpy.take`) gets `IndexedSlices`: one slice for each lookup.

    Returns:
      A list with a gradient of the shape and dtype of each x, or None if x is not connected to a y.

    Raises:
      RuntimeError: outside of a traced function and of a tape.
      ValueError: ``grad_ys`` of another length or shape, an unknown aggregation method or
        `unconnected_gradients`.
      TypeError: a y or an x that is no array and no Variable; ``grad_ys`` of another dtype, or a
        complex y without one.

    Behaves as ``tf.gradients``.

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
        for target, seed in zip(
            targets, seeds_for(targets, targets, grad_ys, "grad_ys"), strict=True
        )
    ]
    record = _record_here(_values(sources))
    reads = [_reads(record, x) for x in sources]
    constants = jax.tree.leaves(stop_gradients, is_leaf=is_variable)
    stops = [array for x in constants for array in _reads(record, x)]
    each = [array for of in reads for array in of]
    _refuse_outer_values(record, targets, sources, each, stops)
    with jax.named_scope(name):
        derivative = SPARSE_GRADIENT if sparse else GRADIENT
        terms = iter(
            differentiate_arrays(
                record, each, targets, derivative, seeds, stops, sums, gate_gradients
            )
        )
        found = [sum_present([next(terms) for _ in of], sums) for of in reads]
        if any(map(is_none, found)) and not stops:  # stops may cut an x off, watched or not
            warn_of_unwatched(record, sources, leaves_of(sources), found, "xs")
        if colocate_gradients_with_ops:
            found = [_colocate(g, of[-1]) for g, of in zip(found, reads, strict=True)]
        if unconnected is UnconnectedGradients.ZERO:
            found = [
                _jax.zeros_of(x.aval) if g is None else g
                for g, x in zip(found, sources, strict=True)
            ]
    return found


def hessians(ys: Any, xs: Any, **options: Any) -> list[Any]:
    """Returns the second derivatives of the sum of ``ys`` in each of ``xs``: diagonal blocks.

    Args:
      ys, xs: as for `gradients`.
      **options: further arguments of `gradients`.

    Returns:
      An array of shape ``x.shape + x.shape`` for each x; zeros if x is not connected to a y.

    Behaves as ``tf.hessians``.

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
    reads = _reads(record, x)
    _refuse_outer_values(record, [first], [x], reads, ())
    total = sum_present(differentiate_arrays(record, reads, [first], JACOBIAN))
    return jnp.zeros((*x.shape, *x.shape), x.dtype) if total is None else total


def hessian_vector_product(ys: Any, xs: Any, v: Any) -> list[Any]:
    """Returns the product of a vector and the Hessian of the sum of ``ys`` in all ``xs`` jointly.

    Args:
      ys, xs: as for `gradients`.
      v: the vector: one array (or number) with the shape and dtype of each x. It is a constant.

    Returns:
      One array of the shape of each x; None for an x that is not connected to a y.

    Raises ValueError if `v` does not have one array for each x.

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
    """Replaces each Variable by its current value."""
    return [v.value if isinstance(v, Variable) else v for v in _list(values)]


def _reads(record: Record, x: Any) -> list[Any]:
    """The arrays that an x stands for: x itself, or all arrays read from a Variable."""
    return record.reads_of(x) or _values(x)


def _record_here(sources: Sequence[Any]) -> Record:
    """Returns the innermost record that follows a source. A traced function without a record is
    traced again with a record; elsewhere raises RuntimeError."""
    recorder = recorder_around()
    records = [] if recorder is None else [r for r in recorder.records if r.keeps_operations]
    if records:
        following = [r for r in records if r.note_use(sources)]
        record = (following or records)[-1]
        record.hand_out()
        return record
    depth = tracing_depth()
    if depth and depth not in _full_records.records:
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


def _refuse_outer_values(
    record: Record,
    targets: Sequence[Any],
    xs: Sequence[Any],
    reads: Sequence[Any],
    stops: Sequence[Any],
) -> None:
    """Raises NotImplementedError if an x is a value of an enclosing traced function, or if an x is
    a Variable and the targets depend on other values of the enclosing function: this record does
    not have the operations that connect those values to the x."""
    if not isinstance(record, _FullRecord) or record.depth == 1:
        return
    is_refused = any(_is_outer_value(record, x) for x in xs)
    if not is_refused and any(map(is_variable, xs)):
        outer = [i for i, array in enumerate(record.arrays) if _is_outer_value(record, array)]
        ends = list(map(record.slot, targets))
        path = entries_between(record, outer, ends)
        used = {slot for entry, _ in path for slot in entry.args}.union(ends).intersection(outer)
        asked = {id(read) for read in reads if _is_outer_value(record, read)}
        others = {id(record.arrays[slot]) for slot in used} - set(map(id, stops)) - asked
        is_refused = bool(others) or len(asked) > 1
    if is_refused:
        raise NotImplementedError(
            "an x is a value of a traced function that encloses the one which calls gradients(), "
            "or a Variable, and the ys depend on other values of the enclosing function: call "
            "gradients() in the function that computes the x, or pass the values that the ys "
            "depend on to the inner function as arguments"
        )


def _is_outer_value(record: _FullRecord, array: Any) -> bool:
    is_traced = _jax.is_tracer(array) and _jax.has_gradient(array)
    return is_traced and _jax.trace_of(array) is not record.trace


def _colocate(gradient: Any, value: Any) -> Any:
    sharding = getattr(jax.typeof(value), "sharding", None)
    if is_slices(gradient) or gradient is None or sharding is None or sharding.mesh.empty:
        return gradient
    constrain: Callable[[Any, Any], Any] = jax.lax.with_sharding_constraint
    return constrain(gradient, sharding)
