"""Gradients are clipped at every layer, where only large ones were to be."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def clip_gradient(x):
    return x


clip_gradient.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.01, 0.01),))


def loss(w, x):
    h = clip_gradient(x @ w)  # cause: changed by a rule
    return jnp.sum(h**2)


ARGUMENTS = (jnp.ones(3), jnp.ones((2, 3)))
