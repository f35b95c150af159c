"""Computes derivatives by finite differences, and judges other derivatives by them.

A verdict compares two numbers: the derivative along a direction, and the same by finite
differences, each with a bound on its error. Differences are taken at ever smaller steps, each a
quarter of the last. Two successive differences give an extrapolated estimate (Richardson). The
change from one estimate to the next, plus the rounding error at that step, bounds the error. A bend
that does not shrink with the step is a kink. The derivative has two errors of its own: rounding of
the terms of its sum, and of constants in narrow dtypes, which its function may have rounded
differently. All limits are relative to the numbers:

- *right*: the numbers differ by no more than ``rtol`` plus the errors, and the errors are small
  enough to tell a wrong number from a right one;
- *wrong*: the numbers differ by ten times the errors (of the error of constants, by three times),
  and by nearly the same amount at points a few roundings away. (If the numbers are left over from a
  cancellation, the amount is another there.)
- otherwise the derivative is not judged.
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
from tracegrad.insight.raising import EPS, Arithmetic

Function = Callable[[Sequence[Any]], list[Any]]

_STEPS = 9  # at the last step, a difference in float64 is mostly rounding
_RESOLUTION = 0.03  # a derivative with a larger relative error is not judged
_ZERO = 1600 * EPS ** (4 / 5)  # times result / argument: rounding alone can give this derivative


@dataclass(frozen=True)
class Limits:
    """How far two derivatives may differ that are computed in a given arithmetic."""

    arithmetic: Arithmetic  # its `eps` may grow while more is traced
    wanted: float | None  # the caller's `rtol`
    atol: float

    @property
    def eps(self) -> float:
        return self.arithmetic.eps

    @property
    def rtol(self) -> float:
        default = min(max(1e-5, 50 * self.eps ** (2 / 3)), _RESOLUTION)
        return default if self.wanted is None else self.wanted


class Weighed(NamedTuple):
    """A sum of weighted numbers.

    Attributes:
      value: the sum.
      size: the sum of the magnitudes, which scales the rounding error of `value`.
      norm: the Euclidean norm of the numbers. It scales the error of `value` if each number has a
        relative error of its own.
    """

    value: float
    size: float
    norm: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """The derivative of weighted results along a direction, by differences: its value, a bound on
    its error, whether the function is smooth there, and the size that rounding alone can give
    (`zero`)."""

    direction: Any
    value: float
    error: float
    smooth: bool
    zero: float = 0.0


class Differences(NamedTuple):
    """Finite differences of the weighted results of a function.

    Attributes:
      weights: for each result its weights; None for a result that is left out.
    """

    fun: Function
    weights: Sequence[Any]
    limits: Limits

    def along(self, at: Sequence[Any], which: int, direction: Any) -> Estimate:
        """Estimates the derivative at a point along a direction in the leaf `which`."""
        here = in_numpy(at[which])
        here = here[np.isfinite(here)]
        spread = (float(np.sqrt(np.mean(np.abs(here) ** 2))) if here.size else 0.0) or 1.0
        before = [in_numpy(out) for out in self.fun(at)]
        eps, rtol = self.limits.eps, self.limits.rtol  # known only after `fun` was traced
        best = Estimate(direction, math.nan, math.inf, False)
        slopes, bends = list[float](), list[float]()
        h, zero, sizes = eps ** (1 / 5) * spread, 0.0, 0.0
        for k in range(_STEPS):
            changes = []
            for distance in (h, -h):
                moved = list(at)
                moved[which] = at[which] + distance * direction
                changes.append(_change(before, self.fun(moved), self.weights))
            (ahead, size), (behind, other_size) = changes
            slopes.append((ahead - behind) / (2 * h))
            bends.append(abs(ahead + behind) / h)
            sizes = max(sizes, size + other_size)  # a change may be rounded away at the next step
            rounding = eps * sizes / h
            zero = zero or _ZERO * size / spread
            if k > 1:
                last, value = ((16 * slopes[i] - slopes[i - 1]) / 15 for i in (k - 1, k))
                error = abs(value - last) + rounding
                # The one-sided derivatives of a smooth function meet as the step shrinks.
                allowed = 2 * (error + rtol * abs(value)) + bends[k - 1] / 2
                smooth = math.isfinite(error) and bends[k] <= allowed
                if (smooth, -error) > (best.smooth, -best.error) or math.isnan(best.value):
                    best = Estimate(direction, value, error, smooth, zero)
                if smooth and error <= 0.1 * rtol * abs(value):
                    break
            h /= 4
        return best

    def along_smooth(self, at: Sequence[Any], which: int, direction: Any, random: Any) -> Estimate:
        """Estimates the same as `along`. If the function is not smooth along a direction, a random
        half of the direction's elements becomes zero, up to four times: some element may be at a
        kink (a rectifier at zero)."""
        found = self.along(at, which, direction)
        for _ in range(4):
            kept = found.direction * (random.random(np.shape(direction)) < 0.5)
            if found.smooth or not np.any(kept):
                break
            found = self.along(at, which, kept)
        return found


def weighed(outs: Sequence[Any], weights: Sequence[Any]) -> Weighed:
    """Returns the real part of the weighted sum of all elements of the floating results."""
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
    """Returns the weighted sum of the changes of the results, and the size that scales its rounding
    error. Elements that did not change add nothing to either, even if they are infinite."""
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
    """Returns random numbers in double precision for each floating type; None for other types."""
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


def nearby_point(at: Sequence[Any], limits: Limits, random: Any) -> list[Any]:
    """Returns a point that is some roundings away from another point."""
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
    nearby: Callable[[], Numbers] | None = None,
) -> str:
    """Returns the verdict on a derivative, by the rules at the top of this file.

    Args:
      expected: estimates by differences; their sum is compared with the derivative.
      got: the derivative.
      limits: how far the two may differ.
      nearby: computes both at another point, a few roundings away.
    """
    want = sum(e.value for e in expected)
    if math.isnan(got.value) and math.isfinite(want):
        return "wrong"  # also at a kink, where any slope between the two sides is right
    if not all(estimate.smooth for estimate in expected):
        return "not smooth"
    if math.isinf(got.value):
        return "wrong"
    difference, size = want - got.value, max(abs(want), abs(got.value))
    # The directions are random, so the errors of the terms add up like a norm.
    constants = limits.arithmetic.constant_eps * got.norm
    rounding = sum(e.error for e in expected) + 16 * limits.eps * got.size
    near, error = limits.rtol * size + limits.atol, rounding + constants
    if abs(difference) <= near + error:
        zero = sum(e.zero for e in expected)
        return "right" if error <= max(near, _RESOLUTION * size, zero) else "not judged"
    if abs(difference) <= near + 10 * rounding + 3 * constants:
        return "not judged"
    for _ in range(2 if nearby else 0):
        assert nearby is not None
        wants, other = nearby()
        change = sum(e.value for e in wants) - other.value - difference
        if not abs(change) <= abs(difference) / 10:
            return "not judged"
    return "wrong"


# The messages of JAX, and of `tracegrad.jvp`, on operations that have no derivative.
_NO_DERIVATIVE = re.compile(
    "no forward-mode derivative|forward-mode autodiff|does not work for lax.while_loop|"
    "does not support reverse-mode|transpose_solve required|callbacks do not support JVP|"
    "gradient .*not supported|shared across the batch .*with a nonzero right cotangent"
)


def status_of(error: Exception) -> str:
    """Returns the verdict on a derivative that could not be computed: ``"none"`` if it does not
    exist, and ``"wrong"`` if a rule failed."""
    is_none = isinstance(error, NotImplementedError) or _NO_DERIVATIVE.search(str(error))
    return "none" if is_none else "wrong"
