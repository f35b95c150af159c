"""What it costs to compile by way of a Graph: `tracegrad.trace` against `jax.jit`.

The train step (adamw) of a 12-layer transformer, traced, lowered and compiled; CPU seconds of all
threads. The two take turns, every time with a new function and empty caches, in alternating order.
Then the gradient of 400 operations by tapes in a traced function, traced and lowered, beside
`jax.grad`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from report import print_table
from transformer import init, train_step

import tracegrad

STAGES = ("trace", "lower", "compile")


def seconds(compiler: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, float]:
    """CPU seconds of each stage of one compilation."""
    jax.clear_caches()
    gc.collect()
    clock = time.process_time
    start = clock()
    traced = compiler(train_step()).trace(*args)
    after_trace = clock()
    lowered = traced.lower()
    after_lower = clock()
    lowered.compile()
    end = clock()
    times = (after_trace - start, after_lower - after_trace, end - after_lower)
    return dict(zip(STAGES, times, strict=True)) | {"all": end - start}


def chain(x: Any) -> Any:
    for _ in range(200):
        x = jnp.sin(x) * x
    return x


def by_tape(x: Any) -> Any:
    with tracegrad.GradientTape() as tape:
        tape.watch(x)
        y = chain(x)
    return tape.gradient(y, x)


def by_nested_tapes(x: Any) -> Any:
    with tracegrad.GradientTape() as tape:
        tape.watch(x)
        first = by_tape(x)
    return tape.gradient(first, x)


def by_gradients(x: Any) -> Any:
    return tracegrad.gradients(chain(x), [x])[0]


def print_tapes(repeat: int) -> None:
    cases = {
        "a tape": (jax.grad(chain), by_tape),
        "nested tapes": (jax.grad(jax.grad(chain)), by_nested_tapes),
        "gradients": (jax.grad(chain), by_gradients),
    }

    def lower(compiler: Callable[..., Any], fun: Callable[..., Any]) -> float:
        jax.clear_caches()
        gc.collect()
        start = time.process_time()
        compiler(lambda x: fun(x)).lower(jnp.float32(0.5))
        return time.process_time() - start

    rows = []
    for name, (by_jax, by_ours) in cases.items():
        lower(jax.jit, by_jax), lower(tracegrad.trace, by_ours)
        pairs = [(lower(jax.jit, by_jax), lower(tracegrad.trace, by_ours)) for _ in range(repeat)]
        theirs, ours = map(statistics.median, zip(*pairs, strict=True))
        rows.append([name, f"{theirs:.2f} s", f"{ours:.2f} s", f"{ours / theirs:.2f}"])
    print_table(
        f"Tracing and lowering the gradient of 400 operations, CPU seconds, medians of {repeat}",
        ["gradient", "jax.jit, jax.grad", "tracegrad.trace", "ratio"],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    repeat = parser.parse_args().repeat

    params = jax.eval_shape(lambda: init(12, 64, 100))
    args = (
        params,
        jax.eval_shape(optax.adamw(1e-3).init, params),
        jax.ShapeDtypeStruct((2, 17), jnp.int32),
    )
    compilers = {"jax.jit": jax.jit, "tracegrad.trace": tracegrad.trace}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in compilers}
    for compiler in compilers.values():
        seconds(compiler, args)  # the first compilation of a process loads libraries
    for i in range(repeat):
        for name in list(compilers)[:: 1 if i % 2 else -1]:
            samples[name].append(seconds(compilers[name], args))

    rows = []
    for stage in (*STAGES, "all"):
        theirs, ours = (statistics.median(s[stage] for s in samples[n]) for n in compilers)
        rows.append([stage, f"{theirs:.2f} s", f"{ours:.2f} s", f"{ours / theirs:.3f}"])
    print_table(
        f"Compiling the train step of a 12-layer transformer, CPU seconds, medians of {repeat}",
        ["stage", *compilers, "ratio"],
        rows,
    )
    print_tapes(repeat)


if __name__ == "__main__":
    main()
