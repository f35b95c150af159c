"""What a traced train step costs on several devices, beside that of `jax.jit`.

    python benchmarks/scaling.py

A data-parallel step of an MLP with the work per device fixed, on one, two and four forced devices
of the CPU in one process, and on two processes of two devices. Both steps run by turns, round
after round; of the medians the ratio is shown. Where devices share cores, the step takes longer
the more of them there are: what counts is that both grow alike.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tracegrad as tg

WIDTH, LAYERS, ROWS = 256, 4, 64  # rows of the batch on each device
ROUNDS, STEPS = 40, 5


def loss(params: list[Any], x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def train_step(params: list[Any], x: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(params, x)
    return value, [w - 0.01 * g for w, g in zip(params, gradient, strict=True)]


def placed(array: np.ndarray[Any, Any], sharding: NamedSharding) -> Any:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def measure(devices: int) -> tuple[float, float, float]:
    """Milliseconds of a step of jit and of a traced one, and the median of the rounds' ratios."""
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    random = np.random.default_rng(0)
    weights = random.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 16
    params = [placed(w, NamedSharding(mesh, P())) for w in weights]
    rows = random.normal(size=(ROWS * devices, WIDTH)).astype(np.float32)
    x = placed(rows, NamedSharding(mesh, P("data")))
    steps = {"jit": jax.jit(train_step), "traced": tg.trace(train_step)}
    times: dict[str, list[float]] = {name: [] for name in steps}

    def run(step: Any) -> float:
        begun, now = time.perf_counter(), params
        for _ in range(STEPS):
            _, now = step(now, x)
        jax.block_until_ready(now)
        return (time.perf_counter() - begun) / STEPS

    for step in steps.values():
        run(step)
    for number in range(ROUNDS):
        for name in sorted(steps, reverse=number % 2 == 1):
            times[name].append(run(steps[name]))
    ratios = [b / a for a, b in zip(times["jit"], times["traced"], strict=True)]
    jit, traced = (1000 * statistics.median(times[name]) for name in ("jit", "traced"))
    return jit, traced, statistics.median(ratios)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "scaling"))
    from processes import started

    print(f"Python {sys.version.split()[0]}, JAX {jax.__version__}, CPU\n")
    print("| processes × devices | `jax.jit`, ms | traced, ms | ratio |")
    print("|---|---|---|---|")
    for processes, devices in ((1, 1), (1, 2), (1, 4), (2, 2)):
        jit, traced, ratio = started(
            __file__, "measure", processes * devices, count=processes, devices=devices, timeout=400
        )[0]
        print(f"| {processes} × {devices} | {jit:.2f} | {traced:.2f} | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()
