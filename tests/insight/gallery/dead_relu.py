"""A bias far below zero: no unit of the layer is ever active (equinox)."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Model(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __call__(self, x):
        h = jax.nn.relu(self.first(x) - 30.0)  # cause: dead units
        return self.second(h)


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


k1, k2 = jax.random.split(jax.random.key(0))
ARGUMENTS = (Model(eqx.nn.Linear(3, 4, key=k1), eqx.nn.Linear(4, 1, key=k2)), jnp.ones((8, 3)))
