"""Twelve layers of sigmoids: the first gets next to nothing (flax.linen)."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(12):
            x = nn.sigmoid(nn.Dense(4)(x))  # cause: vanishing
        return x


model = Deep()


def loss(params, x):
    return jnp.mean(model.apply(params, x) ** 2)


ARGUMENTS = (model.init(jax.random.key(0), jnp.ones((1, 4))), jnp.ones((2, 4)))
