"""Five models that keep much memory for their backward pass, each in the style of its library.

    mixer        MLP-mixer, classifies images              equinox
    transformer  predicts the next token, with dropout     flax.nnx
    resnet       batch norms: statistics beside the loss   flax.linen
    unet         takes noise out of images                 equinox
    gru          predicts a series, a scan over time       flax.linen

`MODELS[name]()` builds a model with random data; `plan_recompute.py` plans that model. No model has
code for recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx


class Task(NamedTuple):
    """``loss(params, *batch)`` returns a float; with `has_aux`, a float and an auxiliary output."""

    loss: Callable[..., Any]
    params: Any
    batch: tuple[Any, ...]
    has_aux: bool = False


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# ------------------------------------------------------------------------------ MLP-mixer, equinox


class MixerBlock(eqx.Module):
    norms: tuple
    patches: eqx.nn.MLP
    channels: eqx.nn.MLP

    def __init__(self, patches, width, key):
        first, second = jax.random.split(key)
        self.norms = (eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width))
        self.patches = eqx.nn.MLP(patches, patches, 2 * patches, 1, jax.nn.gelu, key=first)
        self.channels = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=second)

    def __call__(self, x):
        """f32[patches, width] → the same shape; mixes patches, then channels."""
        x = x + jax.vmap(self.patches, 1, 1)(jax.vmap(self.norms[0])(x))
        return x + jax.vmap(self.channels)(jax.vmap(self.norms[1])(x))


class Mixer(eqx.Module):
    embed: eqx.nn.Conv2d
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, layers, size, patch, width, key):
        keys = jax.random.split(key, layers + 2)
        self.embed = eqx.nn.Conv2d(3, width, patch, stride=patch, key=keys[0])
        self.head = eqx.nn.Linear(width, 10, key=keys[1])
        self.blocks = [MixerBlock((size // patch) ** 2, width, key) for key in keys[2:]]

    def __call__(self, image):
        """f32[3, size, size] → f32[10]."""
        x = self.embed(image)
        x = x.reshape(x.shape[0], -1).T
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(0))


def mixer(layers=4, size=32, patch=4, width=64, batch=32) -> Task:
    keys = jax.random.split(jax.random.key(0), 3)
    params, rest = eqx.partition(Mixer(layers, size, patch, width, keys[0]), eqx.is_array)
    images = jax.random.normal(keys[1], (batch, 3, size, size))
    labels = jax.random.randint(keys[2], (batch,), 0, 10)

    def loss(params, images, labels):
        return cross_entropy(jax.vmap(eqx.combine(params, rest))(images), labels)

    return Task(loss, params, (images, labels))


# ---------------------------------------------------------------------------- transformer, flax.nnx


class TransformerBlock(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            heads, width, use_bias=False, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, deterministic=False)

    def __call__(self, x, mask, rngs):
        """f32[batch, length, width] → the same shape."""
        attended = self.attention(self.norms[0](x), mask=mask)
        x = x + self.dropout(attended, rngs=rngs)
        hidden = nnx.gelu(self.up(self.norms[1](x)))
        return x + self.dropout(self.down(hidden), rngs=rngs)


class Transformer(nnx.Module):
    def __init__(self, layers, width, heads, length, vocabulary, rngs):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.places = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([TransformerBlock(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens, rngs):
        """i32[batch, length] → f32[batch, length, vocabulary]."""
        x = self.embed(tokens) + self.places(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask, rngs)
        return self.embed.attend(self.norm(x))


def transformer(layers=6, width=128, heads=4, length=128, vocabulary=256, batch=8) -> Task:
    model = Transformer(layers, width, heads, length, vocabulary, nnx.Rngs(0))
    definition, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, tokens, key):
        logits = nnx.merge(definition, params, rest)(tokens[:, :-1], nnx.Rngs(dropout=key))
        return cross_entropy(logits, tokens[:, 1:])

    tokens = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, vocabulary)
    return Task(loss, params, (tokens, jax.random.key(2)))


# ------------------------------------------------------------------------------ ResNet, flax.linen


class ResidualBlock(linen.Module):
    features: int
    stride: int

    @linen.compact
    def __call__(self, x):
        strides = (self.stride, self.stride)
        y = linen.Conv(self.features, (3, 3), strides, use_bias=False)(x)
        y = linen.relu(linen.BatchNorm(use_running_average=False)(y))
        y = linen.Conv(self.features, (3, 3), use_bias=False)(y)
        y = linen.BatchNorm(use_running_average=False)(y)
        if x.shape != y.shape:
            x = linen.Conv(self.features, (1, 1), strides, use_bias=False)(x)
        return linen.relu(x + y)


class ResNet(linen.Module):
    width: int
    blocks: int

    @linen.compact
    def __call__(self, x):
        """f32[batch, size, size, 3] → f32[batch, 10]."""
        x = linen.Conv(self.width, (3, 3), use_bias=False)(x)
        x = linen.relu(linen.BatchNorm(use_running_average=False)(x))
        for stage in range(3):
            for k in range(self.blocks):
                stride = 2 if stage and k == 0 else 1
                x = ResidualBlock(self.width * 2**stage, stride)(x)
        return linen.Dense(10)(x.mean((1, 2)))


def resnet(width=16, blocks=3, size=32, batch=16) -> Task:
    model = ResNet(width, blocks)
    keys = jax.random.split(jax.random.key(0), 3)
    images = jax.random.normal(keys[0], (batch, size, size, 3))
    labels = jax.random.randint(keys[1], (batch,), 0, 10)
    variables = model.init(keys[2], images[:1])

    def loss(params, statistics, images, labels):
        variables = {"params": params, "batch_stats": statistics}
        logits, updated = model.apply(variables, images, mutable=["batch_stats"])
        return cross_entropy(logits, labels), updated["batch_stats"]

    batch = (variables["batch_stats"], images, labels)
    return Task(loss, variables["params"], batch, has_aux=True)


# ---------------------------------------------------------------------------------- U-Net, equinox


def two_convolutions(fan_in, fan_out, key):
    layers = []
    for features, own in zip((fan_in, fan_out), jax.random.split(key)):
        layers += [
            eqx.nn.Conv2d(features, fan_out, 3, padding=1, key=own),
            eqx.nn.GroupNorm(4, fan_out),
            eqx.nn.Lambda(jax.nn.silu),
        ]
    return eqx.nn.Sequential(layers)


class UNet(eqx.Module):
    down: list
    middle: eqx.nn.Sequential
    enlarge: list
    up: list
    head: eqx.nn.Conv2d
    halve: eqx.nn.AvgPool2d

    def __init__(self, width, depth, key):
        keys = iter(jax.random.split(key, 3 * depth + 2))
        widths = [width * 2**level for level in range(depth)]
        self.down = [two_convolutions(a, b, next(keys)) for a, b in zip([3, *widths], widths)]
        self.middle = two_convolutions(widths[-1], 2 * widths[-1], next(keys))
        self.enlarge = [
            eqx.nn.ConvTranspose2d(2 * w, w, 2, stride=2, key=next(keys)) for w in widths[::-1]
        ]
        self.up = [two_convolutions(2 * w, w, next(keys)) for w in widths[::-1]]
        self.head = eqx.nn.Conv2d(width, 3, 1, key=next(keys))
        self.halve = eqx.nn.AvgPool2d(2, 2)

    def __call__(self, x):
        """f32[3, size, size] → the same shape."""
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = self.halve(x)
        x = self.middle(x)
        for enlarge, block in zip(self.enlarge, self.up):
            x = block(jnp.concatenate([enlarge(x), skipped.pop()]))
        return self.head(x)


def unet(width=16, depth=3, size=64, batch=8) -> Task:
    keys = jax.random.split(jax.random.key(0), 3)
    params, rest = eqx.partition(UNet(width, depth, keys[0]), eqx.is_array)
    images = jax.random.normal(keys[1], (batch, 3, size, size))
    noise = jax.random.normal(keys[2], images.shape)

    def loss(params, images, noise):
        found = jax.vmap(eqx.combine(params, rest))(images + noise)
        return jnp.mean((found - noise) ** 2)

    return Task(loss, params, (images, noise))


# --------------------------------------------------------------------------------- GRU, flax.linen


class Recurrent(linen.Module):
    width: int

    @linen.compact
    def __call__(self, series):
        """f32[batch, steps, features] → the same shape."""
        hidden = linen.RNN(linen.GRUCell(self.width))(series)
        return linen.Dense(series.shape[-1])(hidden)


def gru(steps=256, features=8, width=64, batch=128) -> Task:
    model = Recurrent(width)
    jumps = jax.random.normal(jax.random.key(0), (batch, steps + 1, features))
    series = jnp.cumsum(jumps, axis=1)
    params = model.init(jax.random.key(1), series[:1])

    def loss(params, series):
        return jnp.mean((model.apply(params, series[:, :-1]) - series[:, 1:]) ** 2)

    return Task(loss, params, (series,))


MODELS: dict[str, Callable[..., Task]] = {
    "mixer": mixer,
    "transformer": transformer,
    "resnet": resnet,
    "unet": unet,
    "gru": gru,
}
