"""Models as what a tape watches and is asked about: their arrays count, and the rest gets None."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tracegrad as tg

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Scaled(eqx.Module):
    linear: eqx.nn.Linear
    rate: float
    activation: object

    def __call__(self, x):
        return self.activation(self.rate * self.linear(x))


def test_an_equinox_model_is_watched_and_gets_the_gradient_of_filter_grad():
    model = Scaled(eqx.nn.Linear(3, 2, key=jax.random.key(0)), 0.5, jnp.tanh)

    def loss(model):
        return jnp.sum(jax.vmap(model)(X) ** 2)

    for unconnected in ("none", "zero"):
        with tg.GradientTape() as tape:
            tape.watch(model)
            value = loss(model)
        gradient = tape.gradient(value, model, unconnected_gradients=unconnected)
        assert_same(gradient, eqx.filter_grad(loss)(model))


def test_an_nnx_module_and_its_state_are_watched():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def loss(model):
        return jnp.sum(model(X) ** 2)

    expected = nnx.grad(loss)(model)
    for watched in (model, nnx.state(model, nnx.Param)):
        with tg.GradientTape() as tape:
            tape.watch(watched)
            value = loss(model)
        gradient = tape.gradient(value, watched)
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_numbers_that_are_no_settings_of_a_model_are_refused():
    x = jnp.ones(())
    with tg.GradientTape() as tape:
        with pytest.raises(ValueError, match=r"a tape watches JAX arrays; it was given 2\.0"):
            tape.watch([x, 2.0])
        tape.watch({"x": x, "f": jnp.sin})
        y = x * 2
    with pytest.raises(TypeError, match=r"source\[1\] is a float: 2\.0"):
        tape.gradient(y, [x, 2.0])
    assert tape.gradient(y, {"x": x, "f": jnp.sin}) == {"x": 2.0, "f": None}
