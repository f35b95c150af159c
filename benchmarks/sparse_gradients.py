"""What a step of gradient descent on a large table costs, of which a batch looks up a few rows.

The dense step computes the gradient as an array of the table's size, `jax.grad`; the sparse ones by
`IndexedSlices`. Every step is given its table to write over. The loss is a sum of squared distances
of the looked-up rows, so that next to nothing but the table is paid for.
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

import tracegrad as tg
from tracegrad import apply_rows

RATE = 0.1
LONGER = 4


def loss(table, ids, targets):
    return jnp.sum((table[ids] - targets) ** 2)


def dense(state, ids, targets):
    (table,) = state
    return (table - RATE * jax.grad(loss)(table, ids, targets),)


def sparse(state, ids, targets):
    (table,) = state
    return (table - RATE * tg.grad(loss, sparse=True)(table, ids, targets),)


def adagrad(state, ids, targets):
    def step(rows, gradients):
        table, squares = rows
        squares = squares + jnp.mean(gradients**2, axis=1)
        return table - RATE * gradients / jnp.sqrt(squares + 1e-8)[:, None], squares

    gradient = tg.grad(loss, sparse=True)(state[0], ids, targets)
    return apply_rows(state, gradient, step)


def on_variable(variable: tg.Variable) -> Callable[..., Any]:
    """The step in TensorFlow's manner: a tape over a Variable, which is then assigned."""

    @tg.trace
    def step(state, ids, targets):
        with tg.GradientTape() as tape:
            value = loss(variable, ids, targets)
        variable.assign_sub(RATE * tape.gradient(value, variable, sparse=True))
        return (value,)  # what the clock waits for: to read the Variable would keep its array

    return step


def temporary_mib(step: Callable[..., Any], state: tuple[Any, ...], batch: Any) -> float:
    """The memory that a step takes beside its state and its batch, by XLA's account."""
    program = step.lower(state, *batch).compile()
    return program.memory_analysis().temp_size_in_bytes / 2**20


def measure(
    step: Callable[..., Any], state: tuple[Any, ...], batches: Any, repeat: int
) -> tuple[float, float, float]:
    """The median time of a step in milliseconds; the memory it takes for a batch, and for one of
    `LONGER` times as many ids, MiB."""
    longer = [jnp.concatenate([array] * LONGER) for array in batches[0]]
    memory = [temporary_mib(step, state, batch) for batch in (batches[0], longer)]
    state = step(jax.tree.map(jnp.copy, state), *batches[0])
    times = []
    for i in range(repeat):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = jax.block_until_ready(step(state, *batches[i % len(batches)]))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3, memory[0], memory[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--ids", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=31, help="steps; ten times as many if sparse")
    options = parser.parse_args()

    keys = jax.random.split(jax.random.key(0), 8)
    shape = options.ids, options.width
    batches = [
        (jax.random.randint(key, shape[:1], 0, options.rows), jax.random.normal(key, shape))
        for key in keys
    ]
    table = jnp.zeros((options.rows, options.width))
    squares = jnp.zeros(options.rows)

    donated: dict[str, Any] = {"donate_argnums": 0}
    steps = {
        "dense, jax.grad": (jax.jit(dense, **donated), (table,), 1),
        "sparse, jax.jit": (jax.jit(sparse, **donated), (table,), 10),
        "sparse, tracegrad.trace": (tg.trace(sparse, **donated), (table,), 10),
        "sparse, tape on a Variable": (on_variable(tg.Variable(table)), (jnp.float32(0),), 10),
        "sparse, row-wise adagrad": (tg.trace(adagrad, **donated), (table, squares), 10),
    }
    found = {
        name: measure(step, state, batches, times * options.repeat)
        for name, (step, state, times) in steps.items()
    }
    slowest = found["dense, jax.grad"][0]
    print_table(
        f"A step on a table of {options.rows:,} × {options.width}, {options.ids:,} ids a batch",
        ["step", "time", "faster", "temp memory", f"at {LONGER} × the ids"],
        [
            [name, f"{ms:.3f} ms", f"{slowest / ms:,.0f} ×", f"{mib:.2f} MiB", f"{longer:.2f} MiB"]
            for name, (ms, mib, longer) in found.items()
        ],
    )


if __name__ == "__main__":
    main()
