"""Weights are rounded to steps without a straight-through gradient (equinox)."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Quantised(eqx.Module):
    weight: jax.Array
    scale: float = 8.0

    def __call__(self, x):
        steps = jnp.round(self.weight * self.scale)  # cause: rounding
        return x @ (steps / self.scale)


def loss(model, x):
    return jnp.mean(model(x) ** 2)


ARGUMENTS = (Quantised(jnp.array([0.3, -0.2])), jnp.ones((4, 2)))


def WRT(path, leaf):
    return path == "weight"
