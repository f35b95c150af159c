"""Weight normalisation of a row of zeros."""

import jax.numpy as jnp


def loss(w, x):
    length = jnp.linalg.norm(w, axis=1)  # cause: NaN in the reverse pass | Inf in the reverse pass
    return jnp.sum(length * x)


ARGUMENTS = (jnp.array([[3.0, 4.0], [0.0, 0.0]]), jnp.ones(2))
CURE = "safe norm"
