"""The programs on which tracegrad must cost nothing: what people write with JAX today.

Each `Program` is a function and a way to make its arguments, small so that XLA compiles it
quickly. `PROGRAMS` holds losses, training steps, and `jax.value_and_grad` of every one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax


@dataclass(frozen=True)
class Program:
    """One function of the zoo.

    `build()` returns the function and its arguments (pytrees of arrays); what it does is done
    under JAX's own settings of dtype promotion, since the libraries count on them.
    `recomputes`: whether XLA gets code that is there twice on purpose (`jax.checkpoint` under a
    derivative), so that on JAX 0.10's CPU the compiler option that keeps it belongs to it.
    """

    name: str
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    recomputes: bool = False

    def __str__(self) -> str:
        return self.name


def array(*shape: int, seed: int = 0, scale: float = 0.3) -> jax.Array:
    """Normal f32 numbers, the same ones in every run."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def labels(count: int, classes: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32) % classes


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


# ------------------------------------------------------------------------------------ plain JAX


def softmax_relu() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(x, w):
        return jnp.sum(jax.nn.softmax(jax.nn.relu(x @ w)) ** 2)

    return loss, (array(8, 12), array(12, 6, seed=1))


def mlp_params(*widths: int) -> list[dict[str, jax.Array]]:
    return [
        {"w": array(n, m, seed=i), "b": jnp.zeros(m)}
        for i, (n, m) in enumerate(itertools.pairwise(widths))
    ]


def mlp_loss(params, x, y):
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return cross_entropy(x @ last["w"] + last["b"], y)


def mlp() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return mlp_loss, (mlp_params(10, 16, 16, 4), array(8, 10, seed=9), labels(8, 4))


def mlp_sgd_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def step(params, x, y):
        loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step, mlp()[1]


def per_example_gradients() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def norms(params, x, y):
        one = jax.grad(lambda p, a, b: mlp_loss(p, a[None], b[None]))
        return jax.vmap(optax.tree.norm)(jax.vmap(one, (None, 0, 0))(params, x, y)).sum()

    return norms, mlp()[1]


def scan_rnn() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(params, xs, target):
        def cell(h, x):
            h = jnp.tanh(x @ params["in"] + h @ params["rec"] + params["b"])
            return h, h @ params["out"]

        _, ys = lax.scan(cell, jnp.zeros(12), xs)
        return jnp.mean((ys - target) ** 2)

    params = {
        "in": array(5, 12),
        "rec": array(12, 12, seed=1),
        "b": jnp.zeros(12),
        "out": array(12, 3, seed=2),
    }
    return loss, (params, array(7, 5, seed=3), array(7, 3, seed=4))


def block(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def block_weights(count: int, width: int) -> list[dict[str, jax.Array]]:
    return [
        {"up": array(width, 2 * width, seed=i), "down": array(2 * width, width, seed=50 + i)}
        for i in range(count)
    ]


def checkpointed_blocks(policy=None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(weights, x):
        for w in weights:
            x = jax.checkpoint(block, policy=policy)(w, x)
        return jnp.mean(x**2)

    return loss, (block_weights(3, 8), array(6, 8, seed=99))


def checkpointed_scan() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(stacked, x):
        x, _ = lax.scan(lambda h, w: (jax.checkpoint(block)(w, h), None), x, stacked)
        return jnp.mean(x**2)

    stacked = jax.tree.map(lambda *ws: jnp.stack(ws), *block_weights(4, 8))
    return loss, (stacked, array(6, 8, seed=99))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def clipped(x, bound):
    return x


clipped.defvjp(lambda x, bound: (x, None), lambda bound, _, ct: (jnp.clip(ct, -bound, bound),))


@jax.custom_jvp
def log1pexp(x):
    return jnp.log1p(jnp.exp(x))


log1pexp.defjvp(
    lambda primals, tangents: (
        log1pexp(*primals),
        tangents[0] * (1 - 1 / (1 + jnp.exp(primals[0]))),
    )
)


def custom_rules() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(x, w):
        h = log1pexp(x @ w)
        return jnp.sum(jnp.sin(clipped(h, 0.01))) + jnp.sum(lax.stop_gradient(h) * x)

    return loss, (array(6, 6), array(6, 6, seed=1))


def control_flow() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(x, n):
        x = lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) + 0.1 * i, x)
        x = lax.cond(x.sum() > 0, jnp.tanh, lambda h: h * 2, x)
        x = lax.switch(n, [jnp.exp, jnp.cos, lambda h: h**2], x)
        return jnp.mean(jnp.sort(x) * lax.associative_scan(jnp.add, x))

    return loss, (array(9), jnp.int32(1))


def attention_with_dropout() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(w, x, key):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        a = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / 2.0)
        keep = jax.random.bernoulli(key, 0.9, a.shape)
        return jnp.mean(jnp.einsum("bqk,bkd->bqd", jnp.where(keep, a, 0.0), v) ** 2)

    return loss, (array(8, 24), array(2, 5, 8, seed=1), jax.random.key(0))


def hessian_vector() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def curvature(params, x, y, v):
        g = jax.grad(mlp_loss)
        return optax.tree.vdot(v, jax.jvp(lambda p: g(p, x, y), (params,), (v,))[1])

    params, x, y = mlp()[1]
    return curvature, (params, x, y, jax.tree.map(jnp.ones_like, params))


# ------------------------------------------------------------------------------------- optax


def adamw() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    optimiser = optax.adamw(1e-3, weight_decay=1e-2)

    def step(params, state, grads):
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = mlp_params(6, 8, 3)
    return step, (params, optimiser.init(params), jax.tree.map(jnp.ones_like, params))


def clipped_scheduled_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, x, y = mlp()[1]
    return step, (params, optimiser.init(params), x, y)


# ---------------------------------------------------------------------------- flax and equinox


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm_2(x))))


class Transformer(nnx.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedding(tokens)
        for layer in self.blocks:
            x = layer(x)
        return self.embedding.attend(self.norm(x))


def nnx_transformer() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def model() -> Transformer:
        return Transformer(2, 8, 2, 13, nnx.Rngs(0))

    definition = nnx.graphdef(nnx.eval_shape(model))
    params, rest = jax.jit(lambda: nnx.split(model(), nnx.Param, ...)[1:])()

    def loss(params, rest, tokens):
        logits = nnx.merge(definition, params, rest)(tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])

    return loss, (params, rest, labels(2 * 6, 13).reshape(2, 6))


def nnx_transformer_adamw_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    loss, (params, rest, tokens) = nnx_transformer()
    optimiser = optax.adamw(1e-3)

    def step(params, state, rest, tokens):
        value, grads = jax.value_and_grad(loss, allow_int=True)(params, rest, tokens)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimiser.init(params), rest, tokens)


def linen_mlp() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm()(nn.relu(nn.Dense(16)(x)))
            return nn.Dense(4)(x)

    x = array(8, 10)
    model = Mlp()

    def loss(params, x, y):
        return cross_entropy(model.apply(params, x), y)

    return loss, (jax.jit(model.init)(jax.random.key(0), x), x, labels(8, 4))


class ConvNet(eqx.Module):
    conv_1: eqx.nn.Conv2d
    conv_2: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    pool: eqx.nn.MaxPool2d
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.conv_1 = eqx.nn.Conv2d(1, 4, 3, key=keys[0])
        self.conv_2 = eqx.nn.Conv2d(4, 4, 3, padding=1, key=keys[1])
        self.norm = eqx.nn.GroupNorm(2, 4)
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.head = eqx.nn.Linear(4 * 3 * 3, 3, key=keys[2])

    def __call__(self, image):
        x = jax.nn.relu(self.conv_1(image))
        x = self.pool(jax.nn.silu(self.norm(self.conv_2(x))))
        return self.head(x.reshape(-1))


def equinox_conv_net() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    params, static = eqx.partition(eqx.filter_jit(ConvNet)(jax.random.key(0)), eqx.is_array)

    def loss(params, images, y):
        return cross_entropy(jax.vmap(eqx.combine(params, static))(images), y)

    return loss, (params, array(4, 1, 8, 8), labels(4, 3))


# --------------------------------------------------------------------------------- the zoo


def value_and_grad_of(build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]):
    """Builds `jax.value_and_grad` of a program in its first argument.

    A program that returns a tree is summed first, so that steps are differentiated too: the
    second derivative of the model.
    """

    def build_gradient() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        fun, args = build()

        def total(*args):
            leaves = jax.tree.leaves(fun(*args))
            return sum(jnp.sum(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))

        return jax.value_and_grad(total, allow_int=True), args

    return build_gradient


saving_dots = partial(checkpointed_blocks, jax.checkpoint_policies.dots_saveable)

BUILDERS = {
    "softmax_relu": softmax_relu,
    "mlp": mlp,
    "mlp_sgd_step": mlp_sgd_step,
    "per_example_gradients": per_example_gradients,
    "scan_rnn": scan_rnn,
    "checkpointed_blocks": checkpointed_blocks,
    "checkpointed_blocks_saving_dots": saving_dots,
    "checkpointed_scan": checkpointed_scan,
    "custom_rules": custom_rules,
    "control_flow": control_flow,
    "attention_with_dropout": attention_with_dropout,
    "hessian_vector": hessian_vector,
    "adamw": adamw,
    "clipped_scheduled_step": clipped_scheduled_step,
    "nnx_transformer": nnx_transformer,
    "nnx_transformer_adamw_step": nnx_transformer_adamw_step,
    "linen_mlp": linen_mlp,
    "equinox_conv_net": equinox_conv_net,
}

PROGRAMS: tuple[Program, ...] = tuple(
    Program(name, build) for name, build in BUILDERS.items()
) + tuple(
    Program(f"value_and_grad_{name}", value_and_grad_of(build), "checkpoint" in name)
    for name, build in BUILDERS.items()
)
