"""Derivatives by finite differences, and the verdict on another number: right, wrong or none.

A verdict compares two numbers of one direction, each with a bound on its error. Differences are
taken at ever smaller steps, each a quarter of the last; two neighbours give an extrapolated
estimate (Richardson), and the change from one estimate to the next, plus what rounding does at that
step, bounds the error. A bend that does not shrink with the step is a kink. The derivative's own
error is that of rounding the terms it is a sum of, and the constants of narrow dtypes in it, which
its function may have rounded otherwise. All limits are relative to these numbers:

- *right*: the numbers differ by no more than ``rtol`` and the errors, and the errors are so small
  that another number would have been seen;
- *wrong*: they differ by ten times the errors, and by as much at a point that is beside this one by
  a few roundings: what cancels to nothing is another number there;
- else it is not judged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad._jax.processes import in_numpy
from tracegrad.insight.raising import EPS, AsItIs, Raised
from tracegrad.ir import Graph, Occurrence, has_gradient, operations

Function = Callable[[Sequence[Any]], list[Any]]

_STEPS = 9  # down to where rounding is most of a difference of float64
_RESOLUTION = 0.03  # of a derivative: with larger errors it is not judged
_ZERO = 1600 * EPS ** (4 / 5)  # of result / argument: a derivative that rounding makes of none


@dataclass(frozen=True)
class Limits:
    """How far apart two numbers may be that are computed in some arithmetic."""

    arithmetic: AsItIs  # its `eps` may still grow, while more is traced
    wanted: float | None  # the caller's relative limit
    atol: float
    is_analytic: bool  # every operation, so that a complex step is exact

    @property
    def eps(self) -> float:
        return self.arithmetic.eps

    @property
    def rtol(self) -> float:
        default = min(max(1e-5, 50 * self.eps ** (2 / 3)), _RESOLUTION)
        return default if self.wanted is None else self.wanted


def limits_of(program: Graph, arithmetic: AsItIs, rtol: float | None, atol: float | None) -> Limits:
    """The limits for a program that is run in an arithmetic."""
    is_raised = isinstance(arithmetic, Raised)  # to real numbers
    is_analytic = not is_raised and all(map(_is_analytic, program.walk()))
    return Limits(arithmetic, rtol, atol or 0.0, is_analytic)


def _is_analytic(found: Occurrence) -> bool:
    node = found.node
    is_real = all(
        jnp.issubdtype(v.aval.dtype, jnp.floating) for v in node.outputs if has_gradient(v)
    )
    return is_real and node.op in operations.ANALYTIC


class Weighed(NamedTuple):
    """A sum of weighed numbers, and the sum of the magnitudes that rounding is relative to."""

    value: float
    size: float
    norm: float = 0.0  # of the numbers: what it comes to if each is off by a part of itself


@dataclass(frozen=True)
class Estimate:
    """The derivative of the weighed results along a direction, by differences: its value, how far
    it may be off, whether the function is smooth there, and below what it may as well be zero."""

    direction: Any
    value: float
    error: float
    smooth: bool
    zero: float = 0.0


def difference(
    fun: Function, at: Sequence[Any], which: int, direction: Any, weights: Any, limits: Limits
) -> Estimate:
    """The derivative of the weighed results along a direction in one leaf."""
    here = in_numpy(at[which])
    here = here[np.isfinite(here)]
    spread = (float(np.sqrt(np.mean(np.abs(here) ** 2))) if here.size else 0.0) or 1.0
    if limits.is_analytic and limits.eps == EPS:
        exact = _complex_step(fun, at, which, direction, weights)
        if exact is not None:
            return Estimate(direction, exact.value, 16 * limits.eps * exact.size, True)

    before = [in_numpy(out) for out in fun(at)]
    best = Estimate(direction, math.nan, math.inf, False)
    slopes, bends = list[float](), list[float]()
    h, zero = limits.eps ** (1 / 5) * spread, 0.0
    for k in range(_STEPS):
        changes = []
        for distance in (h, -h):
            moved = list(at)
            moved[which] = at[which] + distance * direction
            changes.append(_change(before, fun(moved), weights))
        (ahead, size), (behind, other_size) = changes
        slopes.append((ahead - behind) / (2 * h))
        bends.append(abs(ahead + behind) / h)
        rounding = limits.eps * (size + other_size) / h
        zero = zero or _ZERO * size / spread
        if k > 1:
            last, value = ((16 * slopes[i] - slopes[i - 1]) / 15 for i in (k - 1, k))
            error = abs(value - last) + rounding
            # The one-sided derivatives of a smooth function meet as the step shrinks.
            allowed = 2 * (error + limits.rtol * abs(value)) + bends[k - 1] / 2
            smooth = math.isfinite(error) and bends[k] <= allowed
            if (smooth, -error) > (best.smooth, -best.error) or math.isnan(best.value):
                best = Estimate(direction, value, error, smooth, zero)
            if smooth and error <= 0.1 * limits.rtol * abs(value):
                break
        h /= 4
    return best


def along_smooth(
    fun: Function,
    at: Sequence[Any],
    which: int,
    direction: Any,
    weights: Any,
    limits: Limits,
    random: Any,
) -> Estimate:
    """The same along a direction in which the function is smooth.

    Where it is not, some element is at a kink (a rectifier at zero): then half of the elements
    that move stay where they are, a few times.
    """
    found = difference(fun, at, which, direction, weights, limits)
    for _ in range(4):
        if found.smooth or np.size(direction) < 2:
            break
        kept = direction * (random.random(np.shape(direction)) < 0.5)
        if np.any(kept):
            attempt = difference(fun, at, which, kept, weights, limits)
            if attempt.smooth or np.count_nonzero(kept) < np.count_nonzero(direction):
                direction, found = kept, attempt
    return found


def _complex_step(
    fun: Function, at: Sequence[Any], which: int, direction: Any, weights: Any
) -> Weighed | None:
    """The same by one evaluation at an imaginary distance, without cancellation; None where the
    function does not take complex numbers, or leaves the real ones (a logarithm of -1)."""
    moved = [jnp.asarray(leaf, jnp.complex128) for leaf in at]
    moved[which] = moved[which] + 1e-30j * direction
    try:
        outs = fun(moved)
    except Exception:
        return None
    if not all(jnp.iscomplexobj(out) for out in outs):
        return None
    imaginary = [in_numpy(jnp.imag(out)) for out in outs]
    if any(np.any(np.abs(part) > 1e-10) for part in imaginary):
        return None
    return weighed([part / 1e-30 for part in imaginary], weights)


def weighed(outs: Sequence[Any], weights: Sequence[Any]) -> Weighed:
    """The real part of the sum of the floating results, each element by its weight."""
    terms = [
        np.ravel(np.real(in_numpy(out) * weight))
        for out, weight in zip(outs, weights, strict=True)
        if weight is not None
    ]
    every = np.concatenate(terms) if terms else np.zeros(0)
    with np.errstate(invalid="ignore", over="ignore"):
        size, norm = np.sum(np.abs(every)), np.linalg.norm(every)
        return Weighed(float(np.sum(every)), float(size), float(norm))


def _change(
    before: Sequence[Any], outs: Sequence[Any], weights: Sequence[Any]
) -> tuple[float, float]:
    """The same of how the results differ from those before, and what rounding is relative to. An
    element that is what it was adds nothing to either, however large it is, or infinite."""
    value = size = 0.0
    for was, out, weight in zip(before, outs, weights, strict=True):
        if weight is None:
            continue
        now = in_numpy(out)
        moved = now != was
        with np.errstate(invalid="ignore"):
            value += float(np.sum(np.real(np.where(moved, now - was, 0) * weight)))
            size += float(np.sum(np.abs(np.where(moved, was, 0) * weight)))
    return value, size


def random_like(random: Any, avals: Sequence[Any]) -> list[Any]:
    """Random numbers of each floating type, in double precision; None for the others."""
    found: list[Any] = []
    for aval in avals:
        if not _jax.has_gradient(aval):
            found.append(None)
            continue
        numbers = random.normal(size=aval.shape)
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            numbers = numbers + 1j * random.normal(size=aval.shape)
        found.append(numbers)
    return found


def beside(at: Sequence[Any], limits: Limits, random: Any) -> list[Any]:
    """A point that is some roundings beside another one."""
    return [
        leaf * (1 + 64 * limits.eps * random.choice([-1.0, 1.0], size=np.shape(leaf)))
        if _jax.has_gradient(leaf)
        else leaf
        for leaf in at
    ]


Numbers = tuple[Sequence[Estimate], Weighed]


def judge(
    expected: Sequence[Estimate],
    got: Weighed,
    limits: Limits,
    beside: Callable[[], Numbers] | None = None,
) -> str:
    """The verdict on a derivative; see the head of this file.

    Args:
      expected: by differences; what is compared is the sum.
      got: the derivative.
      limits: for both.
      beside: computes both at another point that is `beside` this one.
    """
    want = sum(e.value for e in expected)
    if math.isnan(got.value) and math.isfinite(want):
        return "wrong"  # at a kink too, where any slope between would do
    if not all(estimate.smooth for estimate in expected):
        return "not smooth"
    if math.isinf(got.value):
        return "wrong"
    difference, size = want - got.value, max(abs(want), abs(got.value))
    # All directions are random: what each term is off by adds up as a norm does.
    constants = limits.arithmetic.constant_eps * got.norm
    error = sum(e.error for e in expected) + 16 * limits.eps * got.size + constants
    near = limits.rtol * size + limits.atol
    if abs(difference) <= near + error:
        zero = sum(e.zero for e in expected)
        return "right" if error <= max(near, _RESOLUTION * size, zero) else "not judged"
    if abs(difference) <= near + 10 * error - 7 * constants:
        return "not judged"
    for _ in range(2 if beside else 0):
        assert beside is not None
        wants, other = beside()
        change = sum(e.value for e in wants) - other.value - difference
        if not abs(change) <= abs(difference) / 10:
            return "not judged"
    return "wrong"


# What JAX says, mostly in a ValueError, of what has no derivative; `jvp` of this package as well.
_NO_DERIVATIVE = re.compile(
    "no forward-mode derivative|forward-mode autodiff|does not work for lax.while_loop|"
    "does not support reverse-mode|transpose_solve required|callbacks do not support JVP|"
    "gradient .*not supported"
)


def status_of(error: Exception) -> str:
    """The verdict on a derivative that could not be computed: ``"none"`` where there is none, and
    ``"wrong"`` where a rule failed."""
    is_none = isinstance(error, NotImplementedError) or _NO_DERIVATIVE.search(str(error))
    return "none" if is_none else "wrong"
