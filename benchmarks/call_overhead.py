"""What a warm call costs: `tracegrad.trace` against `jax.jit`'s own dispatch.

Programs that compute next to nothing, so that the call is what is timed: CPU time of the calling
thread until a call returns. The two take turns in short runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from report import print_table

import tracegrad
from tracegrad import _jax

CALLS = 200  # a run

# What JAX before 0.11.2 needs on the CPU to recompute at all (`tracegrad.trace` passes it itself):
# the same for both sides.
KEEP = _jax.keep_recompute_options(jax.default_backend())


def scalar(x):
    return x + 1


def tree(params, x):
    return jax.tree.map(lambda p: p + x, params)


def keywords(x, *, scale, shift):
    return x * scale + shift


def recomputed(x):
    return jnp.sum(jax.checkpoint(jnp.sin)(x))


X = jnp.float32(1.0)
PARAMS = {f"layer_{i}": {"w": jnp.ones(4), "b": jnp.zeros(4)} for i in range(10)}

CALL_KINDS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "one scalar": (scalar, (X,), {}),
    "a tree of 20 arrays": (tree, (PARAMS, X), {}),
    "keyword arguments": (keywords, (X,), {"scale": X, "shift": X}),
    "a gradient with recompute": (jax.grad(recomputed), (X,), {}),
}


def microseconds(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """One run: microseconds a call."""
    start = time.thread_time()
    for _ in range(CALLS):
        result = fun(*args, **kwargs)
    elapsed = time.thread_time() - start
    jax.block_until_ready(result)
    return elapsed / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=301)
    repeat = parser.parse_args().repeat

    rows = []
    for name, (fun, args, kwargs) in CALL_KINDS.items():
        options = KEEP if "recompute" in name else None
        sides = {
            "jax.jit": jax.jit(fun, compiler_options=options),
            "tracegrad.trace": tracegrad.trace(fun),
        }
        samples: dict[str, list[float]] = {side: [] for side in sides}
        for side in sides.values():
            microseconds(side, args, kwargs)
        for i in range(repeat):
            for side in list(sides)[:: 1 if i % 2 else -1]:
                samples[side].append(microseconds(sides[side], args, kwargs))
        theirs, ours = (statistics.median(samples[side]) for side in sides)
        rows.append([name, f"{theirs:.2f} µs", f"{ours:.2f} µs", f"{ours / theirs:.3f}"])
    print_table(
        f"A warm call, medians of {repeat} runs of {CALLS} calls",
        ["arguments", "jax.jit", "tracegrad.trace", "ratio"],
        rows,
    )


if __name__ == "__main__":
    main()
