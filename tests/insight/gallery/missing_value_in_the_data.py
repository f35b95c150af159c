"""A NaN among the training data."""

import jax.numpy as jnp


def loss(w, x):  # cause: NaN in an input, on no line
    return jnp.mean((x @ w) ** 2)


ARGUMENTS = (jnp.ones(3), jnp.array([[1.0, 2.0, 3.0], [1.0, float("nan"), 3.0]]))
