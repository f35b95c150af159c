"""A hand-written rectifier with inputs that are all negative."""

import jax.numpy as jnp


def loss(w, x):
    h = jnp.maximum(-jnp.exp(x @ w), 0.0)  # cause: dead units
    return jnp.sum(h)


ARGUMENTS = (jnp.ones((3, 4)), jnp.ones((8, 3)))
