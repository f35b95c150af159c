"""One `where` hides the log of zero from the value, not from the gradient."""

import jax.numpy as jnp


def loss(p):
    entropy = jnp.where(p > 0, p * jnp.log(p), 0.0)  # cause: NaN in the reverse pass
    return -jnp.sum(entropy)


ARGUMENTS = (jnp.array([0.5, 0.5, 0.0]),)
CURE = "choose twice"
