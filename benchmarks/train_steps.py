"""What a call of a train step of `flax.nnx` costs: `tracegrad.trace` against `nnx.jit`.

An MLP of seven layers with Adam, small enough that the call is most of what is timed: wall-clock
time until the new weights are there. The two, and `jax.jit` of a function of the same arrays, take
turns in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from report import print_table

import tracegrad

CALLS = 20  # a run
LAYERS, WIDTH, BATCH = 7, 64, 8


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def loss(model: MLP, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 1.0) ** 2)


def train_step(model: MLP, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    value, gradient = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, gradient)
    return value


def on_modules(compiled: Callable[..., Any], x: jax.Array) -> Callable[[], Any]:
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step() -> Any:
        compiled(model, optimizer, x)
        return model.layers[0].kernel[...]

    return step


def on_arrays(x: jax.Array) -> Callable[[], Any]:
    """The same step as a function of its state, which is what the others cannot be faster than."""
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    definition, state = nnx.split((model, optimizer))
    leaves, structure = jax.tree.flatten(state)

    @jax.jit
    def compiled(leaves: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        model, optimizer = nnx.merge(definition, jax.tree.unflatten(structure, leaves))
        value = train_step(model, optimizer, x)
        return jax.tree.leaves(nnx.state((model, optimizer))), value

    def step() -> Any:
        leaves[:], _ = compiled(leaves, x)
        return leaves

    return step


def microseconds(step: Callable[[], Any]) -> float:
    """One run: microseconds a call."""
    start = time.perf_counter()
    for _ in range(CALLS):
        jax.block_until_ready(step())
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=101)
    repeat = parser.parse_args().repeat

    x = jnp.ones((BATCH, WIDTH))
    sides = {
        "nnx.jit": on_modules(nnx.jit(train_step), x),
        "tracegrad.trace": on_modules(tracegrad.trace(train_step), x),
        "jax.jit of the arrays": on_arrays(x),
    }
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for step in sides.values():
        microseconds(step)
    for i in range(repeat):
        for side in list(sides)[:: 1 if i % 2 else -1]:
            samples[side].append(microseconds(sides[side]))
    medians = {side: statistics.median(times) for side, times in samples.items()}
    print_table(
        f"A train step, medians of {repeat} runs of {CALLS} calls",
        ["compiled by", "a call", "of nnx.jit's"],
        [[side, f"{t:.0f} µs", f"{t / medians['nnx.jit']:.2f}"] for side, t in medians.items()],
    )


if __name__ == "__main__":
    main()
