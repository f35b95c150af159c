"""A transformer of the size at which compiling and remembering begin to cost, in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = Any


def init(layers: int, width: int, vocabulary: int) -> Params:
    """Parameters in f32; the same in every run."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(rows, columns)) / np.sqrt(rows), jnp.float32)

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    blocks = [
        {
            "norm_1": norm(),
            "qkv": matrix(width, 3 * width),
            "out": matrix(width, width),
            "norm_2": norm(),
            "up": matrix(width, 4 * width),
            "up_bias": jnp.zeros(4 * width),
            "down": matrix(4 * width, width),
            "down_bias": jnp.zeros(width),
        }
        for _ in range(layers)
    ]
    return {"embedding": matrix(vocabulary, width), "blocks": blocks, "norm": norm()}


def layer_norm(p: Params, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.mean(centred**2, -1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-6) * p["scale"] + p["bias"]


def attention(p: Params, x: jax.Array, heads: int) -> jax.Array:
    """f32[batch, tokens, width] → the same; causal."""
    batch, tokens, width = x.shape
    q, k, v = jnp.split((x @ p["qkv"]).reshape(batch, tokens, heads, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5  # weakly typed
    scores = jnp.where(jnp.tri(tokens, dtype=bool), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(batch, tokens, width) @ p["out"]


def block(p: Params, x: jax.Array, heads: int = 4) -> jax.Array:
    x = x + attention(p, layer_norm(p["norm_1"], x), heads)
    h = jax.nn.gelu(layer_norm(p["norm_2"], x) @ p["up"] + p["up_bias"])
    return x + h @ p["down"] + p["down_bias"]


def loss_with(block: Callable[[Params, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """The next-token loss of ``(params, tokens i32[batch, tokens + 1])`` for a kind of block."""

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        x = params["embedding"][tokens[:, :-1]]
        for p in params["blocks"]:
            x = block(p, x)
        logits = layer_norm(params["norm"], x) @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


def train_step(value_and_grad: Callable[..., Any] = jax.value_and_grad) -> Callable[..., Any]:
    """A new function each time, which no cache knows: ``(params, state, tokens)`` → the next and
    the loss, whose gradient is taken by `value_and_grad`."""
    optimiser = optax.adamw(1e-3)
    loss = loss_with(lambda p, x: block(p, x))

    def step(params: Params, state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, grads = value_and_grad(loss)(params, tokens)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step
