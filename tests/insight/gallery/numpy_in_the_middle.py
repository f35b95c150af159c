"""A step of the model is computed by NumPy, on the host."""

import jax
import jax.numpy as jnp
import numpy as np


def smooth(x):
    return np.asarray(x) * 0.5


def loss(w, x):
    shape = jax.ShapeDtypeStruct((3,), "float32")
    h = jax.pure_callback(smooth, shape, w * x)  # cause: host conversion
    return jnp.sum(h)


ARGUMENTS = (jnp.ones(3), jnp.arange(3.0))
