"""The standard deviation of a feature that does not vary (flax.nnx)."""

import jax.numpy as jnp
from flax import nnx


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, use_bias=False, rngs=rngs)

    def __call__(self, x):
        h = self.linear(x)
        spread = h.std(0) + 1e-5  # cause: NaN in the reverse pass | Inf in the reverse pass
        return (h - h.mean(0)) / spread


graph, state = nnx.split(Model(nnx.Rngs(0)))


def loss(state, x):
    return jnp.sum(nnx.merge(graph, state)(x))


ARGUMENTS = (state, jnp.ones((4, 2)))
