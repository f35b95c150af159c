"""The artefact that is damaged, inspected and verified: two functions that share Variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import tracegrad as tg
from tracegrad import save


def write_example(path: Path) -> Any:
    """Writes functions `score` and `step`; returns the shape of `x` with its open dimension."""
    weights = tg.Variable(jnp.linspace(-1.0, 1.0, 64).reshape(16, 4), name="weights")
    count = tg.Variable(jnp.int32(0), name="count", trainable=False)

    @tg.custom_gradient
    def clip(x):
        return x, lambda dy: jnp.clip(dy, -0.5, 0.5)

    def score(x):
        return {"loss": jnp.mean(clip(jnp.tanh(x @ weights.value)) ** 2)}

    def step(x, rate):
        count.assign_add(1)
        return jax.lax.fori_loop(0, 3, lambda i, w: w - rate * jnp.sum(x), weights.value)

    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 16"), "float32")
    rate = jax.ShapeDtypeStruct((), "float32")
    save({"score": (score, [x]), "step": (step, [x, rate])}, path)
    return x
