"""Whether memory stays flat over thousands of steps that each bring a function made anew.

A program that runs for days makes new closures all the time; what is remembered of one must go when
it goes. Each row runs in a process of its own, without a call of the garbage collector, and reads
its resident size from time to time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from report import print_table

import tracegrad as tg

MIB = 2**20
SAMPLES = 100  # of the size
WARM_SHARE = 10  # the size after a tenth of the steps is what the rest is compared with


Step = Callable[[Any, Any], Any]  # from an array and the batch to the next array


def tape_over(make: Callable[[Any], Callable[[Any], Any]]) -> Step:
    """A step under a tape; `make` gives, of the batch, a new loss."""

    def step(w: Any, x: Any) -> Any:
        loss = make(x)
        with tg.GradientTape() as tape:
            tape.watch(w)
            value = loss(w)
        return w - 0.01 * tape.gradient(value, w)

    return step


def tapes_in_one_another(w: Any, x: Any) -> Any:
    """A step on the size of a gradient, of a new function with a gradient of its own."""
    batch = x + 0.0

    @tg.custom_gradient
    def doubled(w: Any) -> Any:
        y = batch @ w
        return jnp.tanh(y), lambda dy: 2.0 * batch.T @ (dy * y)

    with tg.GradientTape() as outer:
        outer.watch(w)
        with tg.GradientTape() as inner:
            inner.watch(w)
            value = jnp.mean(doubled(w) ** 2)
        size = jnp.mean(inner.gradient(value, w) ** 2)
    return w - 0.01 * outer.gradient(size, w)


def compiled_anew(compiler: Callable[..., Any]) -> Step:
    """A step that a new compiled function does; what it closes over is new too."""

    def step(w: Any, x: Any) -> Any:
        rate = 0.01 * jnp.ones(())
        return compiler(lambda w: w - rate * jnp.cos(w))(w)

    return step


def layer(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


jitted_layer = jax.jit(layer)

ROWS: dict[str, tuple[Step, int]] = {  # and how many steps
    "tape, a new function": (tape_over(lambda x: lambda w: layer(w, x)), 20_000),
    "tape, a new function that calls a jitted one": (
        tape_over(lambda x: lambda w: jitted_layer(w, x)),
        20_000,
    ),
    "tape, a new jitted function": (tape_over(lambda x: jax.jit(lambda w: jnp.sum(x @ w))), 2_000),
    "tapes in one another, a new custom_gradient": (tapes_in_one_another, 20_000),
    "a new function in tracegrad.trace": (compiled_anew(tg.trace), 2_000),
    "a new function in jax.jit": (compiled_anew(jax.jit), 2_000),
}


def resident_bytes() -> int:
    """The resident size of this process now; on Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(name: str, factor: float) -> list[float]:
    """The resident size in MiB, SAMPLES times over the steps."""
    step, steps = ROWS[name]
    w, x = jnp.ones((16, 16)) / 16, jnp.ones((8, 16))
    sizes = []
    for _ in range(SAMPLES):
        for _ in range(round(steps * factor / SAMPLES)):
            w = step(w, x)
        jax.block_until_ready(w)
        sizes.append(resident_bytes() / MIB)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--factor", type=float, default=1.0, help="times as many steps")
    parser.add_argument("--only", choices=list(ROWS), help="measure one row, print its sizes")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options.factor)))
        return

    def measured(name: str) -> list[float]:
        command = [sys.executable, __file__, "--only", name, "--factor", str(options.factor)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        return json.loads(output)

    rows = []
    with ThreadPoolExecutor(os.cpu_count()) as processes:  # sizes do not depend on who else runs
        each = list(processes.map(measured, ROWS))
    for (name, (_, steps)), sizes in zip(ROWS.items(), each, strict=True):
        warm, *rest = sizes[SAMPLES // WARM_SHARE - 1 :]
        change = f"{min(rest) - warm:+.1f} to {max(rest) - warm:+.1f}"
        count = f"{round(steps * options.factor):,}"
        rows.append([name, count, f"{warm:.0f}", f"{sizes[-1]:.0f}", change])
    print_table(
        f"Resident MiB after a {WARM_SHARE}th of the steps, after all, and the change between",
        ["each step", "steps", "warm", "end", "change"],
        rows,
    )


if __name__ == "__main__":
    main()
