"""What several tests save: an array of each dtype, and two functions that share Variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import tracegrad as tg
from tracegrad import save

DTYPES = """
bool int4 uint4 int8 uint8 int16 uint16 int32 uint32 float16 bfloat16 float32 complex64
float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
float8_e3m4 float8_e4m3 float4_e2m1fn
""".split()  # noqa: SIM905


def array_of(name: str) -> np.ndarray:
    """Six numbers of a dtype."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2, (2, 3)) if name == "bool" else rng.normal(0, 3, (2, 3))
    with np.errstate(all="ignore"):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        return (np.abs(values) if "u" in name else values).astype(dtype)


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
