"""Reverse mode through while loops: steps that are replayed, memory and time.

The first table counts: of so many checkpoints and steps, how many steps are run again, and the
binomial optimum of Griewank and Walther, which knows the number of steps from the start. The second
is of the gradient of one loop by `rules.checkpointed_loop` and by equinox's checkpointed loop
(`equinox.internal`, which code has to call) with as many checkpoints: XLA's temporary bytes, in
states of the loop, and the time of a call; by turns, in rounds, the ratio of their medians and of
their minima.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from report import print_table

import tracegrad as tg
from tracegrad import _jax

ROUNDS = 61
ROUND = 0.005  # seconds of calls of each
CHECKPOINTS = 1, 2, 3, 4, 6, 8, 12, 16, 20
STEPS = 10, 30, 100, 300, 1000, 10_000
SHAPES = (  # what a step is, checkpoints, steps, floats of a state
    ("sin", 4, 10, 8),
    ("sin", 4, 100, 8),
    ("sin", 16, 10, 8),
    ("sin", 16, 100, 8),
    ("dense", 4, 10, 8),
    ("dense", 4, 100, 8),
    ("dense", 16, 300, 64),
    ("dense", 8, 50, 256),
    ("sin", 2, 300, 4096),
    ("sin", 16, 300, 65536),
)


def replays() -> None:
    def cell(steps: int, checkpoints: int) -> str:
        best = _jax.fewest_replayed(steps, checkpoints)
        return f"{_jax.replayed(steps, checkpoints):,} of {best:,}"

    rows = [
        [str(c), *(cell(n, c) if c > 1 or n <= 1000 else "" for n in STEPS)] for c in CHECKPOINTS
    ]
    header = ["checkpoints", *(f"{n:,} steps" for n in STEPS)]
    print_table("Steps that are replayed, of the optimum", header, rows)
    pairs = [
        (_jax.replayed(n, c), _jax.fewest_replayed(n, c))
        for c in range(1, 21)
        for n in range(1, 301)
    ]
    more = sum(ours > best for ours, best in pairs)
    ours, best = map(sum, zip(*pairs, strict=True))
    print(
        f"\nOf 1 to 20 checkpoints and 1 to 300 steps, {len(pairs)} pairs, {more} replay more than "
        f"the optimum; in all {ours / best:.2f} of it\n"
    )


def gradients(kind: str, checkpoints: int, size: int) -> tuple[Any, Any, Any]:
    """Of both, as functions of weights, the first state and the number of steps; and weights."""
    if kind == "sin":
        weights, step = jnp.full(size, 0.9), lambda w, y: jnp.sin(y) * w
    else:
        normal = np.random.default_rng(0).normal(size=(size, size)) / size**0.5
        weights, step = jnp.asarray(normal, jnp.float32), lambda w, y: jnp.tanh(w @ y)

    def loss_by(while_loop: Callable[..., Any]) -> Callable[..., Any]:
        def loss(w: Any, y: Any, n: Any) -> Any:
            going, init = (lambda c: c[0] < n), (0, y)
            return jnp.sum(while_loop(going, lambda c: (c[0] + 1, step(w, c[1])), init)[1])

        return loss

    def of_equinox(going: Any, step: Any, init: Any) -> Any:
        return eqxi.while_loop(going, step, init, kind="checkpointed", checkpoints=checkpoints)

    rule = tg.rules.checkpointed_loop(checkpoints=checkpoints)
    losses = tg.rewrite(loss_by(lax.while_loop), rule), loss_by(of_equinox)
    ours, theirs = (jax.jit(jax.grad(loss, (0, 1))) for loss in losses)
    return ours, theirs, weights


def cost(kind: str, checkpoints: int, steps: int, size: int) -> list[str]:
    *functions, weights = gradients(kind, checkpoints, size)
    args = weights, jnp.ones(size), jnp.asarray(steps)
    compiled = [function.lower(*args).compile() for function in functions]
    results = [jax.tree.leaves(run(*args)) for run in compiled]
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    start = time.perf_counter()
    jax.block_until_ready(compiled[0](*args))
    calls = max(1, int(ROUND / (time.perf_counter() - start)))
    seconds: tuple[list[float], list[float]] = ([], [])
    for round_ in range(ROUNDS if calls > 1 else ROUNDS // 4):
        for i in (0, 1) if round_ % 2 else (1, 0):
            start = time.perf_counter()
            for _ in range(calls):
                out = compiled[i](*args)
            jax.block_until_ready(out)
            seconds[i].append((time.perf_counter() - start) / calls)
    held = [run.memory_analysis().temp_size_in_bytes / 4 / size for run in compiled]
    ours, theirs = map(statistics.median, seconds)
    return [
        f"{kind}, {size:,} floats",
        str(checkpoints),
        str(steps),
        # Of small states what is held is mostly not states.
        *([f"{each:.1f}" for each in held] if size >= 4096 else ["", ""]),
        f"{ours * 1e6:,.0f} µs",
        f"{theirs * 1e6:,.0f} µs",
        f"{ours / theirs:.2f}",
        f"{min(seconds[0]) / min(seconds[1]):.2f}",
    ]


def main() -> None:
    # A thread that is woken for each call takes longer to wake than the smallest of these take.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    replays()
    header = ["a step", "checkpoints", "steps", "states held", "by equinox"]
    header += ["a gradient", "by equinox", "ratio", "of minima"]
    print_table("One loop", header, [cost(*shape) for shape in SHAPES])


if __name__ == "__main__":
    main()
