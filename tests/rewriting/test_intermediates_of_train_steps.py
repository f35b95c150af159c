"""`intermediates` and `intermediate_gradients` of what differentiates its loss itself.

The oracle is the loss by itself, differentiated with respect to what is added at the place.
"""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tracegrad as tg
from tests.derivatives import by_tape
from tracegrad import match, rules

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
Y = jnp.linspace(1.0, -1.0, 8).reshape(4, 2)
W = jnp.linspace(-0.5, 0.7, 6).reshape(3, 2)
TANH = match.op("tanh")
OPTIMISER = optax.adam(1e-2)


def assert_close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


class Mlp(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __call__(self, x, shift=0.0):
        with jax.named_scope("hidden"):
            x = jnp.tanh(self.first(x))
        return self.second(x + shift)


def test_of_an_equinox_train_step():
    one, two = jax.random.split(jax.random.key(0))
    model = Mlp(eqx.nn.Linear(3, 5, key=one), eqx.nn.Linear(5, 2, key=two))
    state = OPTIMISER.init(eqx.filter(model, eqx.is_array))

    def loss(model, x, y, shift):
        return jnp.mean((jax.vmap(model)(x, shift) - y) ** 2)

    @eqx.filter_jit
    def step(model, state, x, y):
        value, gradient = eqx.filter_value_and_grad(loss)(model, x, y, jnp.zeros((4, 5)))
        updates, state = OPTIMISER.update(gradient, state, model)
        return eqx.apply_updates(model, updates), state, value

    expected = jax.grad(loss, 3)(model, X, Y, jnp.zeros((4, 5)))
    hidden = match.scope("hidden")
    found = tg.intermediate_gradients(step, model, state, X, Y, where=hidden)[1]
    assert list(found) == ["Mlp/hidden"]
    assert_close(found["Mlp/hidden"], expected)
    (_, _, value), values = tg.intermediates(step, model, state, X, Y, where=hidden)
    assert_close(value, loss(model, X, Y, jnp.zeros((4, 5))))
    assert_close(values["Mlp/hidden"], jnp.tanh(jax.vmap(model.first)(X)))


def test_of_an_nnx_train_step():
    model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.tanh)
    optimizer = nnx.Optimizer(model, OPTIMISER, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x, y):
        def loss_fn(model):
            logits = model(x)
            return jnp.sum((logits - y) ** 2), logits

        (value, _), gradient = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, gradient)
        return value

    hidden = model(X)
    found = tg.intermediate_gradients(train_step, model, optimizer, X, Y, where=TANH)[1]
    assert_close(found["Sequential/tanh"], 2 * (hidden - Y))


def loss_of(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def accumulated(w):
    def body(total, x):
        value, gradient = jax.value_and_grad(loss_of)(w, x)
        return total + gradient, value

    return jax.lax.scan(body, jnp.zeros_like(w), X)


STEPS = {
    "jax.grad": lambda w: jax.grad(loss_of)(w, X),
    "jax.vjp": lambda w: jax.vjp(lambda w: loss_of(w, X), w)[1](1.0),
    "jax.jacrev": lambda w: jax.jacrev(loss_of)(w, X),
    "tracegrad.grad": lambda w: tg.grad(loss_of)(w, X),
    "a tape": lambda w: by_tape(lambda w: loss_of(w, X), w),
    "of a jitted loss": lambda w: jax.grad(jax.jit(loss_of))(w, X),
    "of a loss with a checkpoint": lambda w: jax.grad(jax.checkpoint(loss_of))(w, X),
    "of a loss with a branch": lambda w: jax.grad(
        lambda w: jax.lax.cond(w[0, 0] < 0, loss_of, lambda w, x: 0.0, w, X)
    )(w),
    "in a compiled function": lambda w: jax.jit(lambda w: jax.grad(loss_of)(w, X))(w),
    "in a scan": accumulated,
    "of each example": lambda w: jax.vmap(jax.grad(loss_of), (None, 0))(w, X),
    "of the loss of each example in a loop": lambda w: jax.grad(
        lambda w: jnp.sum(jax.lax.map(lambda x: loss_of(w, x), X))
    )(w),
}


@pytest.mark.parametrize("name", STEPS)
def test_they_are_those_of_the_loss_however_it_is_differentiated(name):
    found = tg.intermediate_gradients(STEPS[name], W, where=TANH)[1]
    assert list(found) == ["tanh"]
    assert_close(np.reshape(found["tanh"], (4, 2)), 2 * jnp.tanh(X @ W))
    out, values = tg.intermediates(STEPS[name], W, where=TANH)
    assert_close(np.reshape(values["tanh"], (4, 2)), jnp.tanh(X @ W))
    for a, b in zip(*map(jax.tree.leaves, (out, STEPS[name](W))), strict=True):
        assert_close(a, b)


SHOWS_ONLY_VALUES = {
    "jax.jacfwd": lambda w: jax.jacfwd(loss_of)(w, X),
    "jax.hessian": lambda w: jax.hessian(loss_of)(w, X),
    "a gradient that was made before": functools.partial(jax.grad(loss_of), x=X),
}


@pytest.mark.parametrize("name", SHOWS_ONLY_VALUES)
def test_values_are_shown_where_no_gradient_can_be(name):
    step = SHOWS_ONLY_VALUES[name]
    (hidden,) = tg.intermediates(step, W, where=TANH)[1].values()
    assert_close(hidden, jnp.tanh(X @ W))


def test_rules_around_act_on_what_arrives():
    def of(w):
        return tg.intermediate_gradients(lambda w: jax.grad(loss_of)(w, X), w, where=TANH)[1][
            "tanh"
        ]

    doubled = tg.trace(of, rules=[rules.scale_gradient(match.op("integer_pow"), 3.0)])
    assert_close(doubled(W), 3 * of(W))


def test_where_no_gradient_arrives_there_are_zeros():
    def step(w):
        return jax.grad(lambda w: jnp.sum(w) + jax.lax.stop_gradient(loss_of(w, X)))(w)

    assert_close(tg.intermediate_gradients(step, W, where=TANH)[1]["tanh"], jnp.zeros((4, 2)))


def test_calls_of_one_function_have_their_own_gradients_in_order():
    @jax.jit
    def layer(x):
        return jnp.tanh(x)

    def loss(x, shifts):
        unused = layer(x) + shifts[0]
        first = layer(2 * x) + shifts[1]
        second = layer(first) + shifts[2]
        return jnp.sum(second**2) + 0 * jnp.sum(jax.lax.stop_gradient(unused))

    shifts = [jnp.zeros((4, 3))] * 3
    expected = jax.grad(loss, 1)(X, shifts)
    step = jax.jit(lambda x: jax.grad(loss)(x, shifts))
    for differentiate in (lambda x: jax.grad(loss)(x, shifts), jax.checkpoint(step)):
        found = tg.intermediate_gradients(differentiate, X, where=TANH)[1]
        assert list(found) == ["tanh", "tanh_1", "tanh_2"]
        for got, wanted in zip(found.values(), expected, strict=True):
            assert_close(got, wanted)


@jax.jit
def positive(x):
    return jnp.maximum(x, 0)


@pytest.mark.parametrize("function", [jax.nn.relu, positive])
def test_of_a_jitted_function_in_a_scan_there_is_what_the_loss_computes_alone(function):
    def loss(scales, shifts):
        def layer(x, each):
            return function(each[0] * x) + each[1], None

        return jnp.sum(jax.lax.scan(layer, X, (scales, shifts))[0] ** 2)

    def step(scales):
        return jax.value_and_grad(loss)(scales, jnp.zeros((2, 4, 3)))[0]

    name, scales = function.__name__, jnp.array([1.5, 0.5])
    _, values = tg.intermediates(step, scales, where=match.call(name))
    assert list(values) == [name]
    assert_close(values[name], [function(1.5 * X), function(0.75 * X)])
    found = tg.intermediate_gradients(step, scales, where=match.call(name))[1]
    assert_close(found[name], jax.grad(loss, 1)(scales, jnp.zeros((2, 4, 3))))


@pytest.mark.parametrize("layers", [None, 2], ids=["once", "in a scan"])
def test_statistics_that_leave_a_scope_beside_activations_get_zeros(layers):
    def loss(w, x):
        def layer(x, _=None):
            with jax.named_scope("norm"):
                mean = jnp.mean(jax.lax.stop_gradient(x), 0)
                x = w * (x - jnp.mean(x, 0))
            return x, 0.9 * mean

        x, statistics = layer(x) if layers is None else jax.lax.scan(layer, x, None, layers)
        return jnp.sum(x**3), statistics

    def step(w, x):
        return jax.value_and_grad(loss, has_aux=True)(w, x)

    norm = match.scope("norm")
    w = jnp.float32(0.7)
    _, expected = tg.intermediate_gradients(loss, w, X, where=norm, has_aux=True)
    _, found = tg.intermediate_gradients(step, w, X, where=norm)
    assert list(found) == list(expected) == ["norm"]
    shapes = [array.shape[-2:] for array in found["norm"]]
    assert len(shapes) == 2
    assert (4, 3) in shapes
    for array, other in zip(found["norm"], expected["norm"], strict=True):
        assert_close(array, other)


def test_what_the_step_does_not_differentiate_raises():
    def step(w):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(X) @ w))(w)

    with pytest.raises(tg.GraphError, match=r"<Apply tanh.*is not computed"):
        tg.intermediate_gradients(step, W, where=TANH)[1]
    assert_close(tg.intermediates(step, W, where=TANH)[1]["tanh"], jnp.tanh(X))


def test_a_loss_that_differentiates_the_same_function_is_ambiguous():
    def penalised(w):
        return loss_of(w, X) + jnp.sum(jax.grad(loss_of)(w, X) ** 2)

    with pytest.raises(tg.GraphError, match="may be meant, or the gradients of the inner function"):
        tg.intermediate_gradients(penalised, W, where=TANH)[1]
    _, values = tg.intermediates(penalised, W, where=TANH)
    assert sorted(values) == ["tanh", "tanh_1"]


def test_the_gradient_of_what_is_shown_is_that_of_the_step():
    def first(w):
        return jnp.sum(tg.intermediates(STEPS["jax.grad"], w, where=TANH)[0] ** 2)

    expected = jax.grad(lambda w: jnp.sum(jax.grad(loss_of)(w, X) ** 2))(W)
    np.testing.assert_allclose(jax.jit(jax.grad(first))(W), expected, rtol=1e-4, atol=1e-5)


def test_a_value_that_is_the_same_at_each_step_of_a_scan_is_found_once():
    def loss(w):
        return jnp.sum(jax.lax.scan(lambda carry, x: (carry * jnp.tanh(w) + x, None), w, X[0])[0])

    w = jnp.float32(0.4)
    (value, slope), values = tg.intermediates(jax.value_and_grad(loss), w, where=TANH)
    assert_close((value, slope), jax.value_and_grad(loss)(w))
    assert list(values) == ["tanh"]
    assert_close(values["tanh"], jnp.tanh(w))
