"""The statistics that `explain` computes of arrays; each is a vector of a few floats.

NumPy computes a statistic, in double precision, since XLA would compile a program for each shape.
XLA computes the statistics of arrays that are partly on other processes, and of large arrays on an
accelerator. Inside of a loop, the compiled program computes each statistic, with one exception: the
loop stacks small arrays over its steps, and NumPy measures the stack by a measure that takes `axes`
(the number of leading axes that count steps).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad.rewriting.norms import over_largest

# The positions of the numbers in `exact` and in `edge`.
NORM, ZEROS, NAN, INF, LEAST, GREATEST = range(6)
EDGE_NAN, EDGE_INF, EDGE_NORM, EDGE_GIVEN, EDGE_OPERANDS = range(5)

OPERANDS = 4  # `edge` has the values of at most so many operands
_MOST_BY_NUMPY = 1 << 20  # elements; XLA measures larger arrays on an accelerator

Measure = Callable[..., Any]


def _by_numpy_or_xla(measure: Measure) -> Measure:
    """Turns a `measure` that takes ``(xp, *arrays)`` into a function of arrays that chooses ``xp``:
    NumPy or `jax.numpy`."""
    # Traced once for each shape.
    options_of: tuple[str, ...] = tuple(getattr(measure, "__kwdefaults__", None) or ())
    compiled = jax.jit(functools.partial(measure, jnp), static_argnames=options_of)
    # Without the barrier, XLA fuses each statistic with all operations before it: the time to
    # compile grew with the square of a program's length.
    barrier: Callable[[Any], Any] = jax.lax.optimization_barrier

    @functools.wraps(measure)
    def run(*arrays: Any, **options: int) -> Any:
        leaves = arrays if len(arrays) == 1 else jax.tree.leaves(arrays)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return compiled(*barrier(arrays), **options)
        if not all(map(_is_for_numpy, leaves)):
            return compiled(*arrays, **options)
        with np.errstate(all="ignore"):
            if len(arrays) == 1:
                return measure(np, _copy_to_host(arrays[0]), **options)
            return measure(np, *jax.tree.map(_copy_to_host, arrays), **options)

    return run


def _is_for_numpy(x: Any) -> bool:
    if not isinstance(x, jax.Array):
        return True
    if not x.is_fully_addressable:
        return False
    return x.size <= _MOST_BY_NUMPY or all(d.platform == "cpu" for d in x.devices())


def _copy_to_host(x: Any) -> Any:
    is_key = jnp.issubdtype(getattr(x, "dtype", np.dtype(float)), jax.dtypes.extended)
    return np.zeros((), bool) if is_key else np.asarray(x)


def _magnitudes(xp: Any, x: Any) -> Any:
    if xp is np:
        x = np.asarray(x)
        x = x.astype(complex) if np.iscomplexobj(x) else x.astype(float)
    x = xp.abs(x) if xp.iscomplexobj(x) else xp.asarray(x)
    return x.astype(xp.float32) if x.dtype.itemsize < 4 else x


def _norm(xp: Any, x: Any, axes: int = 0) -> Any:
    """Returns the Euclidean norm over the axes after the first ones, also of entries whose squares
    overflow or underflow."""
    rows = x.reshape(*x.shape[:axes], math.prod(x.shape[axes:]))
    if xp is np:
        # einsum, not dot: threads of BLAS would wait for those of XLA
        squares = np.einsum("...i,...i->...", rows, rows)
        if np.all((squares > 1e-280) & (squares < 1e280)):
            return np.sqrt(squares)
    rows, largest = over_largest(rows, -1, xp)
    return largest[..., 0] * xp.sqrt(xp.sum(xp.square(rows), -1))


def _share_of_zeros(xp: Any, x: Any, axes: int = 0) -> Any:
    """Returns the share of zeros over the axes after the first ones: below 1, even after rounding,
    unless all elements are zero."""
    size = math.prod(x.shape[axes:])
    zeros = xp.sum(x == 0, tuple(range(axes, x.ndim)))
    below = xp.minimum(zeros / max(1, size), 1 - 2.0**-20)
    return xp.where(zeros == size, 1.0, below) if size else xp.zeros(x.shape[:axes])


def _vector(xp: Any, *values: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(float) if xp is jnp else np.dtype(float)
    return xp.stack([xp.asarray(v).astype(dtype) for v in values], axis=-1)


@_by_numpy_or_xla
def index(xp: Any, x: Any) -> Any:
    """Returns the index of a branch as a statistic."""
    return _vector(xp, x)


@_by_numpy_or_xla
def exact(xp: Any, x: Any, *, axes: int = 0) -> Any:
    """Returns the norm, the share of zeros, the numbers of NaNs and of Infs, the least and the
    greatest element; for each index of the first `axes` axes."""
    x = _magnitudes(xp, x)
    lead, within = x.shape[:axes], tuple(range(axes, x.ndim))
    if x.size == 0:
        return xp.zeros((*lead, 6), xp.float32)
    least, greatest = xp.min(x, within), xp.max(x, within)
    nans = infs = xp.zeros(lead)
    if xp is jnp or not np.isfinite([least, greatest]).all():
        nan = xp.isnan(x)
        nans, infs = xp.sum(nan, within), xp.sum(xp.isinf(x), within)
        least = xp.min(xp.where(nan, xp.inf, x), within)
        greatest = xp.max(xp.where(nan, -xp.inf, x), within)
    return _vector(
        xp, _norm(xp, x, axes), _share_of_zeros(xp, x, axes), nans, infs, least, greatest
    )


@_by_numpy_or_xla
def edge(xp: Any, result: Any, incoming: Any, operands: Sequence[Any], *, axes: int = 0) -> Any:
    """Measures the cotangent `result` that a VJP returns for an operand: the numbers of NaNs and
    Infs, and the norm. Then, at the first NaN or Inf: the `incoming` cotangent, and the values of
    the operands (NaN for None, and for operands of other shapes). For each index of the first
    `axes` axes."""
    lead = xp.shape(result)[:axes]

    def as_rows(x: Any) -> Any:
        return _magnitudes(xp, x).reshape(*lead, math.prod(xp.shape(x)[axes:]))

    flat = as_rows(result)
    if flat.size == 0:
        return xp.zeros((*lead, EDGE_OPERANDS + OPERANDS), xp.float32)
    norm, unknown = _norm(xp, flat, axes), xp.full(lead, xp.nan)
    nans = infs = xp.zeros(lead)
    shape: Any = None
    if xp is jnp or not np.isfinite(norm).all():
        nans, infs = xp.sum(xp.isnan(flat), -1), xp.sum(xp.isinf(flat), -1)
        if xp.ndim(result) == axes < xp.ndim(incoming):  # a scalar factor: a sum of terms
            shape, score = xp.shape(incoming), _bad_terms(xp, as_rows, incoming, operands)
        else:
            shape, score = xp.shape(result), ~xp.isfinite(flat)
        place, is_known = xp.argmax(score, -1)[..., None], xp.any(score, -1)

    def value_at_place(x: Any) -> Any:
        if x is not None and xp.ndim(x) == axes:
            return _magnitudes(xp, x)
        if x is None or xp.shape(x) != shape:
            return unknown
        return xp.where(is_known, xp.take_along_axis(as_rows(x), place, -1)[..., 0], unknown)

    values = [value_at_place(x) for x in operands[:OPERANDS]]
    values += [unknown] * (OPERANDS - len(values))
    return _vector(xp, nans, infs, norm, value_at_place(incoming), *values)


def shown_by_edge(result: Any, incoming: Any, operands: Sequence[Any]) -> list[Any]:
    """Returns the operands that `edge` may show an element of; None in place of other operands."""
    shapes = (), jnp.shape(result), jnp.shape(incoming)
    # A literal of a weak type is a Python number.
    arrays = [x if hasattr(x, "nbytes") else np.asarray(x) for x in operands[:OPERANDS]]
    return [
        x if jnp.shape(x) in shapes and jnp.issubdtype(jnp.result_type(x), jnp.number) else None
        for x in arrays
    ]


def _bad_terms(xp: Any, as_rows: Any, incoming: Any, operands: Sequence[Any]) -> Any:
    """Returns 1 where a zero cotangent meets a NaN or Inf, 2 where a nonzero one does, else 0."""
    terms = as_rows(incoming)
    score = xp.zeros(terms.shape, xp.int32)
    for x in operands:
        if x is not None and xp.shape(x) == xp.shape(incoming):
            score = xp.maximum(score, ~xp.isfinite(as_rows(x)) * (1 + (terms != 0)))
    return score


def of_parts(
    measure: Measure, form: Any, parts: Sequence[tuple[int, tuple[int, ...]]], *stacks: Any
) -> Any:
    """Measures the arrays that are packed in stacks of vectors.

    Args:
      measure: takes `axes`.
      form: the tree of the arguments of `measure`.
      parts: for each leaf of the tree, where it starts in its stack, and its shape.
      stacks: for each leaf, its stack.
    """
    arrays = []
    for (start, shape), stack in zip(parts, stacks, strict=True):
        array = _copy_to_host(stack) if _is_for_numpy(stack) else stack
        part = array[..., start : start + math.prod(shape)]
        arrays.append(part.reshape(*part.shape[:-1], *shape))
    return measure(*jax.tree.unflatten(form, arrays), axes=stacks[0].ndim - 1)


@_by_numpy_or_xla
def norms_of_rule(xp: Any, by_rule: Any, by_derivative: Any, incoming: Any) -> Any:
    """Returns four norms: of the cotangent by a rule, of the cotangent by the derivative, of their
    difference, and of the incoming cotangent."""
    by_rule, by_derivative, incoming = (
        _magnitudes(xp, x) for x in (by_rule, by_derivative, incoming)
    )
    terms = by_rule, by_derivative, by_rule - by_derivative, incoming
    return _vector(xp, *(_norm(xp, x) for x in terms))


@_by_numpy_or_xla
def amplified(xp: Any, result: Any, factor: Any) -> Any:
    """Measures a cotangent that was multiplied by a factor: the largest factor divided by the
    least, the norm of the cotangent where the factor is over a tenth of the largest, and its norm
    elsewhere."""
    result, factor = _magnitudes(xp, result), xp.abs(_magnitudes(xp, factor))
    if result.size == 0 or factor.size == 0:
        return xp.zeros(3)
    factor = xp.broadcast_to(factor, result.shape)
    is_large = factor > xp.max(factor) / 10
    parts = xp.where(is_large, result, 0), xp.where(is_large, 0, result)
    return _vector(xp, xp.max(factor) / xp.min(factor), *(_norm(xp, x) for x in parts))
