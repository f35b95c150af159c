"""How the time to trace a reverse pass grows with the operations it goes through: linearly.

A chain of operations, its forward and its reverse pass traced and not compiled, in CPU time of the
thread, by every way to ask for the gradient; beside `jax.grad` under `jax.jit`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from report import print_table

import tracegrad as tg

COUNTS = (100, 1_000, 10_000)


def chain(count: int, factor: Any) -> Callable[[Any], Any]:
    """A new function of `count` operations on arrays of the shape of `factor`."""

    def function(x: Any) -> Any:
        for _ in range(count // 2):
            x = lax.mul(lax.sin(x), factor)
        return jnp.sum(x)

    return function


def by_gradients(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: tg.gradients(function(x), x)


def by_tape(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def gradient(x: Any) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    return gradient


WAYS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "jax.grad in jax.jit": lambda f: jax.jit(jax.grad(f)),
    "tracegrad.grad": lambda f: tg.trace(tg.grad(f)),
    "tracegrad.gradients": lambda f: tg.trace(by_gradients(f)),
    "a tape": lambda f: tg.trace(by_tape(f)),
}


_lengths = itertools.count(2)


def seconds(way: Callable[[Callable[[Any], Any]], Any], count: int) -> float:
    """CPU seconds of this thread to trace the gradient of a new chain."""
    x = jnp.ones(next(_lengths))  # a new type: a tape knows the structure of what it has seen
    traced = way(chain(count, x))
    start = time.thread_time()
    traced.eval_shape(x)
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat

    found: dict[tuple[str, int], list[float]] = {(w, n): [] for w in WAYS for n in COUNTS}
    for way in WAYS.values():
        seconds(way, COUNTS[0])
    for _ in range(repeat):
        for name, way in WAYS.items():
            for count in COUNTS:
                found[name, count].append(seconds(way, count))
    each = {key: statistics.median(values) / key[1] * 1e6 for key, values in found.items()}
    few, _, many = COUNTS
    print_table(
        f"CPU µs an operation, medians of {repeat}",
        ["way", *(f"{n:,} operations" for n in COUNTS), f"{many:,} to {few:,}"],
        [
            [w, *(f"{each[w, n]:.0f}" for n in COUNTS), f"{each[w, many] / each[w, few]:.2f}"]
            for w in WAYS
        ],
    )


if __name__ == "__main__":
    main()
