"""One small transformer block in flax.linen, flax.nnx and equinox, as their users write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen, nnx

WIDTH, LENGTH, LAYERS = 4, 3, 2

# The pieces that the hand-written counterparts replace.
Pieces = tuple[Callable[..., Any], Callable[..., Any]]
PLAIN: Pieces = (jax.nn.relu, jax.nn.softmax)


def attend(softmax: Callable[..., Any], q: Any, k: Any, v: Any) -> Any:
    return softmax(q @ k.T / 2) @ v


class LinenBlock(linen.Module):
    pieces: Pieces = PLAIN

    @linen.compact
    def __call__(self, x):
        relu, softmax = self.pieces
        q, k, v = (linen.Dense(WIDTH, name=name)(x) for name in ("query", "key", "value"))
        x = x + attend(softmax, q, k, v)
        return x + linen.Dense(WIDTH, name="mlp")(relu(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs, pieces=PLAIN):
        self.query, self.key, self.value, self.mlp = (
            nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)
        )
        self.pieces = pieces

    def __call__(self, x):
        relu, softmax = self.pieces
        x = x + attend(softmax, self.query(x), self.key(x), self.value(x))
        return x + self.mlp(relu(x))


class EquinoxBlock(eqx.Module):
    linears: list[eqx.nn.Linear]
    pieces: Pieces = eqx.field(static=True)

    def __init__(self, key, pieces=PLAIN):
        keys = jax.random.split(key, 4)
        self.linears = [eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in keys]
        self.pieces = pieces

    def __call__(self, x):
        relu, softmax = self.pieces
        query, key, value, mlp = (jax.vmap(linear) for linear in self.linears)
        x = x + attend(softmax, query(x), key(x), value(x))
        return x + mlp(relu(x))


@dataclass(frozen=True)
class Model:
    """`block(params, x)` of one layer, and the parameters of all layers."""

    block: Callable[[Any, Any], Any]
    params: list[Any]

    def loss(self, params: Any, x: Any) -> Any:
        for i, own in enumerate(params):
            with jax.named_scope(f"block_{i}"):
                x = self.block(own, x)
        return jnp.sum(jnp.sin(x))

    def loss_by_scan(self, stacked: Any, x: Any) -> Any:
        def step(x, own):
            with jax.named_scope("block"):
                return self.block(own, x), None

        return jnp.sum(jnp.sin(jax.lax.scan(step, x, stacked)[0]))


def linen_model(pieces: Pieces = PLAIN) -> Model:
    block = LinenBlock(pieces)
    keys = jax.random.split(jax.random.key(0), LAYERS)
    init = jax.jit(block.init)
    return Model(block.apply, [init(key, jnp.ones((LENGTH, WIDTH))) for key in keys])


def nnx_model(pieces: Pieces = PLAIN) -> Model:
    blocks = [NnxBlock(nnx.Rngs(i), pieces) for i in range(LAYERS)]
    definition = nnx.graphdef(blocks[0])
    states = [nnx.to_pure_dict(nnx.state(block)) for block in blocks]

    def block(params, x):
        state = nnx.state(nnx.merge(definition, nnx.state(blocks[0])))
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(definition, state)(x)

    return Model(block, states)


def equinox_model(pieces: Pieces = PLAIN) -> Model:
    build = eqx.filter_jit(EquinoxBlock)
    blocks = [build(jax.random.key(i), pieces) for i in range(LAYERS)]

    def block(linears, x):
        return eqx.tree_at(lambda model: model.linears, blocks[0], linears)(x)

    return Model(block, [block.linears for block in blocks])


MODELS = {"linen": linen_model, "nnx": nnx_model, "equinox": equinox_model}
