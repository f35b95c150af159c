"""Values and gradients inside of models of each framework."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import tracegrad as tg

pytestmark = pytest.mark.both_jax

X, KEY = jnp.array([0.3, -0.2, 0.9]), jax.random.key(0)


def of_linen():
    model = linen.Sequential([linen.Dense(3), jnp.tanh, linen.Dense(3), jnp.tanh])
    params = model.init(KEY, X)
    second = {"params": params["params"]["layers_2"]}
    return model.apply, params, lambda h: linen.Dense(3).apply(second, h)


def of_nnx():
    first, second = (nnx.Linear(3, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    model = nnx.Sequential(first, jnp.tanh, second, jnp.tanh)
    return lambda model, x: model(x), model, second


def of_equinox():
    model = eqx.nn.MLP(3, 3, 3, 1, jnp.tanh, jnp.tanh, key=KEY)
    return lambda model, x: model(x), model, model.layers[1]


@pytest.mark.parametrize("model_of", [of_linen, of_nnx, of_equinox])
def test_values_and_gradients_inside_of_a_model(model_of):
    apply, model, second = model_of()

    def loss(model, x):
        return jnp.sum(jnp.sin(apply(model, x)))

    (value, values), (same, gradients) = (
        tool(loss, model, X, where=tg.match.op("tanh"))
        for tool in (tg.intermediates, tg.intermediate_gradients)
    )
    assert value == same == loss(model, X)
    hidden, out = values.values()
    np.testing.assert_allclose(out, apply(model, X), rtol=1e-6)
    np.testing.assert_allclose(jnp.tanh(second(hidden)), out, rtol=1e-6)
    by_hand = jax.grad(lambda h: jnp.sum(jnp.sin(jnp.tanh(second(h)))))(hidden)
    for found, expected in zip(gradients.values(), (by_hand, jnp.cos(out)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
