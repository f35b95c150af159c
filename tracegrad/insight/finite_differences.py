"""Derivatives by finite differences, and whether another number is the same."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad._jax.processes import in_numpy
from tracegrad.ir import Graph, operations

Function = Callable[[Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class Limits:
    """How far apart two numbers may be, and with what step differences are best."""

    rtol: float
    atol: float
    step: float
    exact: bool  # whether every operation is analytic, so that a complex step is exact


def limits_of(program: Graph, rtol: float | None, atol: float | None) -> Limits:
    """By the least precise float dtype that a program computes in."""
    eps = float(np.finfo(np.float64).eps)
    exact = True
    for found in program.walk():
        exact = exact and found.node.op in operations.ANALYTIC
        for value in found.node.outputs:
            dtype = getattr(value.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
                finfo: Any = jnp.finfo
                eps = max(eps, float(finfo(dtype).eps))
                exact = exact and bool(jnp.issubdtype(dtype, jnp.floating))
    default = max(1e-5, 50 * eps ** (2 / 3))
    return Limits(
        default if rtol is None else rtol,
        default / 100 if atol is None else atol,
        eps ** (1 / 5),
        exact and eps < 1e-15,
    )


@dataclass(frozen=True)
class Estimate:
    """The derivative of the weighed results along a direction, by differences: its value, how far
    it may be off, and whether the function is smooth there."""

    direction: Any
    value: float
    error: float
    smooth: bool


def _difference(
    fun: Function, at: Sequence[Any], which: int, direction: Any, weights: Any, limits: Limits
) -> Estimate:
    """The derivative of the weighed results along a direction in one leaf."""
    here = in_numpy(at[which])
    here = here[np.isfinite(here)]
    spread = float(np.sqrt(np.mean(np.abs(here) ** 2))) if here.size else 0.0
    step = limits.step * (spread or 1.0)
    if limits.exact:
        exact = _complex_step(fun, at, which, direction, weights)
        if exact is not None:
            return Estimate(direction, exact, 0.0, True)

    before = fun(at)

    def along(distance: float) -> float:
        moved = list(at)
        moved[which] = at[which] + distance * direction
        return weighed(fun(moved), weights, before)

    best = Estimate(direction, math.nan, math.inf, False)
    for scale in (1.0, 0.1, 0.01):
        h = step * scale
        ahead, behind, near, nearer = along(h), along(-h), along(h / 2), along(-h / 2)
        wide, narrow = (ahead - behind) / (2 * h), (near - nearer) / h
        # The one-sided derivatives of a smooth function meet as the step shrinks; at a kink not.
        bend, less = (abs(x + y) for x, y in ((ahead, behind), (near, nearer)))
        bend, less = bend / h, 2 * less / h
        value, error = (4 * narrow - wide) / 3, abs(narrow - wide)
        noise = limits.rtol * max(abs(value), abs(wide)) + limits.atol
        smooth = math.isfinite(value) and error < 100 * noise and not (less > noise + 0.75 * bend)
        if smooth and (not best.smooth or error < best.error):
            best = Estimate(direction, value, error, True)
            if error < noise:
                break
        elif not best.smooth:
            best = Estimate(direction, value, error, False)
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
    found = _difference(fun, at, which, direction, weights, limits)
    for _ in range(4):
        if found.smooth or np.size(direction) < 2:
            break
        kept = direction * (random.random(np.shape(direction)) < 0.5)
        if np.any(kept):
            attempt = _difference(fun, at, which, kept, weights, limits)
            if attempt.smooth or np.count_nonzero(kept) < np.count_nonzero(direction):
                direction, found = kept, attempt
    return found


def _complex_step(
    fun: Function, at: Sequence[Any], which: int, direction: Any, weights: Any
) -> float | None:
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
    imaginary = [jnp.imag(out) for out in outs]
    if any(np.any(np.abs(in_numpy(part)) > 1e-10) for part in imaginary):
        return None
    return weighed(imaginary, weights) / 1e-30


def weighed(
    outs: Sequence[Any], weights: Sequence[Any], before: Sequence[Any] | None = None
) -> float:
    """The real part of the sum of the floating results, each element by its weight.

    `before`: what to take from them first. An element that is what it was is then zero, however
    large it is, or infinite, and adds no rounding to the sum of those that have moved.
    """
    total = 0.0
    for k, (out, weight) in enumerate(zip(outs, weights, strict=True)):
        if weight is None:
            continue
        numbers = in_numpy(out)
        if before is not None:
            was = in_numpy(before[k])
            with np.errstate(invalid="ignore"):
                numbers = np.where(numbers == was, 0, numbers - was)
        total += float(np.sum(np.real(numbers * weight)))
    return total


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


def judge(expected: Sequence[Estimate], got: float, limits: Limits) -> str:
    want = sum(e.value for e in expected)
    if math.isnan(got) and math.isfinite(want):
        return "wrong"  # at a kink too, where any slope between would do
    if not all(estimate.smooth for estimate in expected):
        return "not smooth"
    error = sum(e.error for e in expected)
    near = limits.rtol * max(abs(want), abs(got)) + limits.atol + 10 * error
    return "right" if abs(want - got) <= near else "wrong"


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
