"""1 / (1 + exp(-x)) is right at -100, and its gradient is not."""

import jax.numpy as jnp


def sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))  # cause: NaN in the reverse pass


def loss(x):
    return jnp.sum(sigmoid(x))


ARGUMENTS = (jnp.array([-100.0, 1.0]),)
CURE = "sigmoid"
