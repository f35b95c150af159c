"""A mean over no elements is masked after the division."""

import jax.numpy as jnp


def loss(x, mask):
    count = jnp.sum(mask * x, axis=1)
    mean = jnp.where(count > 0, 1.0 / count, 0.0)  # cause: NaN in the reverse pass
    return jnp.sum(mean)


ARGUMENTS = (jnp.ones((2, 3)), jnp.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
CURE = "choose twice"
