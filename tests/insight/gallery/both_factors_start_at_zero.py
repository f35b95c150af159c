"""A low-rank adapter with both matrices initialised to zeros."""

import jax.numpy as jnp


def loss(adapter, x):
    h = x @ adapter["down"]
    y = h @ adapter["up"]  # cause: multiplied by zero
    return jnp.sum(y + x)


def WRT(path, leaf):
    return path == "down"


ARGUMENTS = ({"down": jnp.zeros((3, 2)), "up": jnp.zeros((2, 3))}, jnp.ones((4, 3)))
