"""A bias that no line uses."""

import jax.numpy as jnp


def loss(params, x):  # cause: unused, on no line
    return jnp.mean((x @ params["w"]) ** 2)


ARGUMENTS = ({"w": jnp.ones(3), "bias": jnp.ones(())}, jnp.ones((2, 3)))
