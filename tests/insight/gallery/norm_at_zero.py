"""The distance of a point from itself: the derivative of the root at zero."""

import jax.numpy as jnp


def distance(a, b):
    square = jnp.sum((a - b) ** 2)
    return jnp.sqrt(square)  # cause: NaN in the reverse pass | Inf in the reverse pass


def loss(a, b):
    return distance(a, b) + jnp.sum(a)


ARGUMENTS = (jnp.ones(3), jnp.ones(3))
CURE = "safe norm"
