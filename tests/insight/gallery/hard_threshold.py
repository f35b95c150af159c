"""A learned threshold that is only compared with."""

import jax.numpy as jnp


def loss(threshold, x):
    kept = x > threshold  # cause: comparison
    return jnp.sum(kept * x)


ARGUMENTS = (jnp.float32(0.5), jnp.array([0.2, 0.7]))
