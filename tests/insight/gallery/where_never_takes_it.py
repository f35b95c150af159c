"""The mask of a `where` is false everywhere."""

import jax.numpy as jnp


def loss(params, x):
    long = jnp.arange(3) >= 3
    h = jnp.where(long, x * params["late"], x * params["early"])  # cause: untaken branch
    return jnp.sum(h)


ARGUMENTS = ({"late": jnp.ones(3), "early": jnp.ones(3)}, jnp.ones(3))
