"""The sum of squares does not fit float16."""

import jax.numpy as jnp


def loss(w, x):
    h = (x @ w).astype(jnp.float16)
    return jnp.sum(h * h)  # cause: Inf in the forward pass


ARGUMENTS = (100.0 * jnp.ones((3, 2)), jnp.ones((2, 3)))
