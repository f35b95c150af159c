"""A placeholder of zeros was left in the backward pass of a rule."""

import jax.numpy as jnp

import tracegrad as tg


@tg.custom_gradient
def affine(x, w):
    def gradient(dy):
        return dy * w, jnp.zeros_like(w)

    return x * w, gradient


def loss(w, x):
    return jnp.sum(affine(x, w))  # cause: custom rule


ARGUMENTS = (jnp.ones(3), jnp.arange(3.0))
