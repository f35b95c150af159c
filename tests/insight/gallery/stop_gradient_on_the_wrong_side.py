"""The target of a value function is to be constant, but it is the prediction that was stopped."""

import jax
import jax.numpy as jnp


def loss(params, x, reward):
    value = jax.lax.stop_gradient(x @ params["value"])  # cause: stop_gradient
    target = reward + 0.9 * (x @ params["target"])
    return jnp.mean((target - value) ** 2)


ARGUMENTS = (
    {"value": jnp.ones(3), "target": jnp.ones(3)},
    jnp.array([[1.0, 2.0, 3.0]]),
    jnp.ones(1),
)
