"""A softmax that does not subtract the maximum."""

import jax.numpy as jnp


def softmax(logits):
    weights = jnp.exp(logits)  # cause: Inf in the forward pass
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def loss(logits, labels):
    return -jnp.sum(labels * jnp.log(softmax(logits)))


ARGUMENTS = (jnp.array([[200.0, 1.0]]), jnp.array([[1.0, 0.0]]))
CURE = "softmax"
