"""A recurrence whose root meets zero in its third step."""

import jax
import jax.numpy as jnp


def cell(h, x):
    h = h + jnp.sqrt(x)  # cause: NaN in the reverse pass | Inf in the reverse pass
    return h, h


def loss(x):
    _, hs = jax.lax.scan(cell, jnp.zeros(2), x)
    return jnp.sum(hs)


ARGUMENTS = (jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0], [7.0, 8.0]]),)
STEP = 2
