"""A rule divides by what may be zero."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def length(x):
    return jnp.sqrt(jnp.sum(x**2))


def forward(x):
    y = length(x)
    return y, (x, y)


def backward(residuals, ct):
    x, y = residuals
    return (ct * x / y,)  # cause: NaN in the reverse pass


length.defvjp(forward, backward)


def loss(x):
    return length(x) + jnp.sum(x)


ARGUMENTS = (jnp.zeros(3),)
