"""The backward pass of a custom rule forgets the scale."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def scaled(x, scale):
    return x * scale


def forward(x, scale):
    return scaled(x, scale), scale


def backward(scale, ct):
    return ct * scale, None


scaled.defvjp(forward, backward)


def loss(params, x):
    y = scaled(x, params["scale"])  # cause: custom rule
    return jnp.sum(y**2)


ARGUMENTS = ({"scale": jnp.float32(2.0)}, jnp.ones(3))
