"""A histogram by `floor`: no gradient to what is sorted into the bins."""

import jax.numpy as jnp


def soft_bin(x):
    return jnp.floor(x / 0.5)  # cause: rounding


def loss(x, weights):
    return jnp.sum(weights * soft_bin(x))


ARGUMENTS = (jnp.array([0.1, 0.9]), jnp.ones(2))
