"""Inputs that were not normalised saturate `tanh` to the last bit."""

import jax.numpy as jnp


def loss(w, x):
    h = jnp.tanh(x @ w)  # cause: saturated
    return jnp.sum(h)


ARGUMENTS = (jnp.ones((3, 2)), 100.0 * jnp.ones((4, 3)))
