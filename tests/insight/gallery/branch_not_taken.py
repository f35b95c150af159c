"""A weight is used only in the branch that this call does not take."""

import jax
import jax.numpy as jnp


def loss(params, x, training):
    y = jax.lax.cond(  # cause: untaken branch
        training > 0,
        lambda x: x * params["dropout_scale"],
        lambda x: x * 2.0,
        x,
    )
    return jnp.sum(y * params["w"])


ARGUMENTS = ({"dropout_scale": jnp.ones(3), "w": jnp.ones(3)}, jnp.ones(3), jnp.int32(0))
