"""What TensorFlow and JAX have under one name, with other numbers.

Each is a row of the table "Same name, other number" in docs/migration.md: TensorFlow's number,
which ``record.py`` records, the number here, and, where it is short, what gives TensorFlow's here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

COLUMN, ROW = [[0.0], [0.02]], [[0.0, 0.02]]  # of a variance of 0.0001


@dataclass(frozen=True)
class Number:
    """`tensorflow(tf)` there; `here(f)` for the function `ours`, or another one of `parameters`."""

    tensorflow: Callable[[Any], Any]
    here: Callable[[Any], Any]
    ours: Any
    parameters: str = "x"


def gradients(tf: Any, f: Callable[..., Any], *xs: float) -> Any:
    points = [tf.constant(x) for x in xs]
    with tf.GradientTape() as tape:
        tape.watch(points)
        y = f(*points)
    return tape.gradient(y, points)


def gradients_here(f: Callable[..., Any], *xs: float) -> Any:
    return jax.grad(f, argnums=tuple(range(len(xs))))(*xs)


def adam_of_keras(tf: Any) -> Any:
    weight = tf.Variable(0.0)
    tf.keras.optimizers.Adam(0.1).apply_gradients([(tf.constant(1e-6), weight)])
    return weight


def of_one(name: str, ours: Any) -> Number:
    """The gradient at 0 of a function of one number."""
    return Number(
        lambda tf: gradients(tf, getattr(tf, name), 0.0),
        lambda f: gradients_here(f, 0.0),
        ours,
    )


def of_two(name: str, ours: Any) -> Number:
    """The gradients of a function of two numbers that are equal."""
    return Number(
        lambda tf: gradients(tf, getattr(tf, name), 1.0, 1.0),
        lambda f: gradients_here(f, 1.0, 1.0),
        ours,
        "x, y",
    )


NUMBERS = {
    "gradients of `maximum` at a tie": of_two("maximum", jnp.maximum),
    "gradients of `minimum` at a tie": of_two("minimum", jnp.minimum),
    "gradient of `clip` to 0 and 1, at 0": Number(
        lambda tf: gradients(tf, lambda x: tf.clip_by_value(x, 0.0, 1.0), 0.0),
        lambda f: gradients_here(f, 0.0),
        lambda x: jnp.clip(x, 0.0, 1.0),
    ),
    "gradient of `abs` at 0": of_one("abs", jnp.abs),
    "gradient of `where(x > 0, sqrt(x), 0)` at 0": Number(
        lambda tf: gradients(tf, lambda x: tf.where(x > 0, tf.sqrt(x), 0.0), 0.0),
        lambda f: gradients_here(f, 0.0),
        lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0),
    ),
    "gradient of `leaky_relu(x, 0.2)` at 0": Number(
        lambda tf: gradients(tf, lambda x: tf.nn.leaky_relu(x, 0.2), 0.0),
        lambda f: gradients_here(f, 0.0),
        lambda x: jax.nn.leaky_relu(x, 0.2),
    ),
    "`leaky_relu(-1)`": Number(
        lambda tf: tf.nn.leaky_relu(-1.0), lambda f: f(-1.0), jax.nn.leaky_relu
    ),
    "`gelu(1)`": Number(lambda tf: tf.nn.gelu(1.0), lambda f: f(1.0), jax.nn.gelu),
    "Adam's first step, of 0.1, for a gradient of 1e-6": Number(
        adam_of_keras, lambda adam: adam.update(1e-6, adam.init(0.0))[0], optax.adam(0.1)
    ),
    "`BatchNorm` of 0 and 0.02": Number(
        lambda tf: tf.keras.layers.BatchNormalization()(tf.constant(COLUMN), training=True),
        lambda layer: layer(jnp.array(COLUMN)),
        nnx.BatchNorm(1, rngs=nnx.Rngs(0)),
        "",
    ),
    "`LayerNorm` of 0 and 0.02": Number(
        lambda tf: tf.keras.layers.LayerNormalization()(tf.constant(ROW)),
        lambda layer: layer(jnp.array(ROW)),
        nnx.LayerNorm(2, rngs=nnx.Rngs(0)),
        "",
    ),
}
