"""A position is cast to an integer to look a table up: the position gets no gradient."""

import jax.numpy as jnp


def loss(position, table):
    index = position.astype(jnp.int32)  # cause: cast
    return jnp.sum(table[index] ** 2)


ARGUMENTS = (jnp.array([0.3, 1.7]), jnp.array([1.0, 2.0, 3.0]))
