"""An encoder that was frozen once, in the module's own code (flax.nnx)."""

import jax
import jax.numpy as jnp
from flax import nnx


class Model(nnx.Module):
    def __init__(self, rngs):
        self.encoder = nnx.Linear(3, 4, rngs=rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        features = jnp.tanh(self.encoder(x))
        return self.head(jax.lax.stop_gradient(features))  # cause: stop_gradient


graph, state = nnx.split(Model(nnx.Rngs(0)))


def loss(state, x):
    return jnp.mean(nnx.merge(graph, state)(x) ** 2)


ARGUMENTS = (state, jnp.ones((2, 3)))
