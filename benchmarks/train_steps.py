"""What a call with a model costs: `tracegrad.trace` against `nnx.jit` and `equinox.filter_jit`.

An MLP of seven layers, small enough that the call is most of what is timed. Of flax.nnx a train
step with Adam, in wall-clock time until the new weights are there; of equinox such a step and the
model alone, in CPU time of the calling thread until the call returns. The two, and `jax.jit` of a
function of the same arrays, take turns in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from report import print_table

import tracegrad

CALLS = 20  # a run
LAYERS, WIDTH, BATCH = 7, 64, 8
SMALL = 8  # the width where it is the call alone that is timed, with one row


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


# ---------------------------------------------------------------------------------------- equinox

OPTIMIZER = optax.adam(1e-3)


def evaluated(model: eqx.Module, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


def equinox_loss(model: eqx.Module, x: jax.Array) -> jax.Array:
    return jnp.mean((evaluated(model, x) - 1.0) ** 2)


def equinox_step(model: eqx.Module, state: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
    value, gradient = eqx.filter_value_and_grad(equinox_loss)(model, x)
    updates, state = OPTIMIZER.update(gradient, state, model)
    return eqx.apply_updates(model, updates), state, value


def equinox_model() -> tuple[eqx.Module, Any]:
    model = eqx.nn.MLP(SMALL, SMALL, SMALL, LAYERS - 1, key=jax.random.key(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def of_equinox(compiled: Callable[..., Any], x: jax.Array) -> Callable[[], Any]:
    model, state = equinox_model()

    def step() -> Any:
        nonlocal model, state
        model, state, _ = compiled(model, state, x)
        return model.layers[0].weight

    return step


def of_equinox_on_arrays(x: jax.Array) -> Callable[[], Any]:
    arrays, rest = eqx.partition(equinox_model(), eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)

    @jax.jit
    def compiled(leaves: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        model, state = eqx.combine(jax.tree.unflatten(structure, leaves), rest)
        *new, value = equinox_step(model, state, x)
        return jax.tree.leaves(eqx.filter(new, eqx.is_array)), value

    def step() -> Any:
        leaves[:], _ = compiled(leaves, x)
        return leaves

    return step


def evaluation(compiled: Callable[..., Any], x: jax.Array) -> Callable[[], Any]:
    model, _ = equinox_model()
    return lambda: compiled(model, x)


def evaluation_of_arrays(x: jax.Array) -> Callable[[], Any]:
    arrays, rest = eqx.partition(equinox_model()[0], eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    compiled = jax.jit(
        lambda leaves, x: evaluated(eqx.combine(jax.tree.unflatten(structure, leaves), rest), x)
    )
    return lambda: compiled(leaves, x)


def until_there(step: Callable[[], Any]) -> float:
    """One run: microseconds a call, waited for."""
    start = time.perf_counter()
    for _ in range(CALLS):
        jax.block_until_ready(step())
    return (time.perf_counter() - start) / CALLS * 1e6


def until_it_returns(step: Callable[[], Any]) -> float:
    """One run: microseconds of the calling thread a call."""
    start = time.thread_time()
    for _ in range(CALLS):
        result = step()
    elapsed = time.thread_time() - start
    jax.block_until_ready(result)
    return elapsed / CALLS * 1e6


def compare(
    title: str,
    sides: dict[str, Callable[[], Any]],
    microseconds: Callable[[Callable[[], Any]], float],
    repeat: int,
) -> None:
    """The sides take turns; the first is what the others are measured by."""
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for step in sides.values():
        microseconds(step)
    for i in range(repeat):
        for side in list(sides)[:: 1 if i % 2 else -1]:
            samples[side].append(microseconds(sides[side]))
    medians = {side: statistics.median(times) for side, times in samples.items()}
    peer = next(iter(sides))
    print_table(
        f"{title}, medians of {repeat} runs of {CALLS} calls",
        ["compiled by", "a call", f"of {peer}'s"],
        [[side, f"{t:.0f} µs", f"{t / medians[peer]:.2f}"] for side, t in medians.items()],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=101)
    repeat = parser.parse_args().repeat

    x = jnp.ones((BATCH, WIDTH))
    compare(
        "A train step of flax.nnx",
        {
            "nnx.jit": on_modules(nnx.jit(train_step), x),
            "tracegrad.trace": on_modules(tracegrad.trace(train_step), x),
            "jax.jit of the arrays": on_arrays(x),
        },
        until_there,
        repeat,
    )
    x = jnp.ones((1, SMALL))
    compare(
        "A train step of equinox",
        {
            "filter_jit": of_equinox(eqx.filter_jit(equinox_step), x),
            "tracegrad.trace": of_equinox(tracegrad.trace(equinox_step), x),
            "jax.jit of the arrays": of_equinox_on_arrays(x),
        },
        until_it_returns,
        repeat,
    )
    compare(
        "A model of equinox",
        {
            "filter_jit": evaluation(eqx.filter_jit(evaluated), x),
            "tracegrad.trace": evaluation(tracegrad.trace(evaluated), x),
            "jax.jit of the arrays": evaluation_of_arrays(x),
        },
        until_it_returns,
        repeat,
    )


if __name__ == "__main__":
    main()
