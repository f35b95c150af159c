"""arccos at 1 has an infinite derivative."""

import jax.numpy as jnp


def loss(a, b):
    cosine = jnp.sum(a * b)
    return jnp.arccos(cosine)  # cause: NaN in the reverse pass | Inf in the reverse pass


ARGUMENTS = (jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0]))
CURE = "clip"
