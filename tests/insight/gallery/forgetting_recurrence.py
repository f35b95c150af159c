"""A recurrence that forgets: after sixty steps nothing comes back."""

import jax
import jax.numpy as jnp


def cell(h, x):
    h = jnp.tanh(0.2 * h + x)  # cause: vanishing
    return h, None


def loss(h0, xs):
    h, _ = jax.lax.scan(cell, h0, xs)
    return jnp.sum(h)


ARGUMENTS = (jnp.ones(3), 0.1 * jnp.ones((40, 3)))
