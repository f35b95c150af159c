"""A learned gate is cast to bool to serve as a mask."""

import jax.numpy as jnp


def loss(gate, x):
    mask = gate.astype(bool)  # cause: cast
    return jnp.sum(jnp.where(mask, x, 0.0))


ARGUMENTS = (jnp.array([1.0, 0.0, 2.0]), jnp.ones(3))
