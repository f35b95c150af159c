"""Scores are turned into ranks."""

import jax.numpy as jnp


def loss(scores, relevance):
    ranks = jnp.argsort(scores)  # cause: argmax
    return jnp.sum(relevance / (1.0 + ranks))


ARGUMENTS = (jnp.array([0.2, 0.9, 0.4]), jnp.array([1.0, 0.0, 2.0]))
