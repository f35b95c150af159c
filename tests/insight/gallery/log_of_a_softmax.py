"""A probability that underflows to zero before its log is taken."""

import jax
import jax.numpy as jnp


def loss(logits, labels):
    p = jax.nn.softmax(logits)
    return -jnp.mean(jnp.sum(labels * jnp.log(p), axis=-1))  # cause: Inf in the forward pass


ARGUMENTS = (jnp.array([[200.0, 0.0]]), jnp.array([[0.5, 0.5]]))
CURE = "log_softmax"
