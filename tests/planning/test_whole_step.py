"""A memory budget is the step's: a step that holds more than its gradients' plans say so."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import pytest

import tracegrad as tg
from tracegrad.planning import BudgetTooSmall, BudgetWarning, plan_recompute

pytestmark = pytest.mark.both_jax

WEIGHTS, X = [jnp.eye(16) * 0.3] * 12, jnp.ones((4096, 16))


def net(weights, x):
    for weight in weights:
        x = x + jnp.tanh(x @ weight)
    return x


def loss(weights, x):
    return jnp.mean(net(weights, x) ** 2)


made_outside = jax.grad(loss)


def gan(weights, x):
    """Two players: neither's gradient needs what the other's keeps."""
    judge = jax.grad(lambda judge: loss(judge, net(weights, x)))(weights)
    return judge, jax.grad(lambda maker: -loss(weights, net(maker, x)))(weights)


def two_minibatches(weights, x):
    return jax.grad(loss)(weights, x), jax.grad(loss)(weights, x * 2)


def one_outside(weights, x):
    return jax.grad(loss)(weights, x), made_outside(weights, x * 2)


def hessian_product(weights, x):
    return jax.jvp(jax.grad(loss), (weights, x), (weights, x))[1]


def held(function):
    return function.lower(WEIGHTS, X).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("step", "share", "why"),
    [
        (gan, 0.45, "has several gradients"),
        (two_minibatches, 0.55, "has several gradients"),
        (one_outside, 0.55, "made outside"),
        (hessian_product, 0.55, "differentiates a gradient"),
    ],
)
def test_step_that_holds_more_than_its_budget_says_so(step, share, why):
    budget = int(held(jax.jit(step)) * share)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            holds = held(tg.trace(step, memory_budget=budget))
    except BudgetTooSmall:
        pytest.fail("the budget was to be enough for each gradient by itself")
    assert holds > budget  # else there is nothing to tell
    (warning,) = [w for w in said if issubclass(w.category, BudgetWarning)]
    assert why in str(warning.message)
    assert f"memory_budget={budget}" in str(warning.message)
    assert warning.filename == __file__


def train(weights, x):
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return value, [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]


@pytest.mark.parametrize(
    ("step", "share"),
    [(gan, 1.5), (two_minibatches, 1.5), (one_outside, 1.5), (hessian_product, 1.5), (train, 0.6)],
)
def test_step_within_its_budget_is_silent(step, share):
    budget = int(held(jax.jit(step)) * share)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert held(tg.trace(step, memory_budget=budget)) <= budget


@jax.custom_vjp
def ruled(weights, x):
    return loss(weights, x)


ruled.defvjp(
    lambda weights, x: (loss(weights, x), (weights, x)),
    lambda kept, cotangent: jax.vjp(loss, *kept)[1](cotangent),
)


@pytest.mark.parametrize(
    ("fun", "in_the_way"),
    [
        (jax.checkpoint(loss), "jax.checkpoint of loss"),
        (lambda weights, x: jax.checkpoint(loss)(weights, x) * 2, "test_whole_step.py"),
        (ruled, "custom gradient of ruled"),
    ],
)
def test_budget_that_a_closed_function_keeps_from_being_met_says_so(fun, in_the_way):
    with pytest.raises(BudgetTooSmall) as raised:
        plan_recompute(fun, WEIGHTS, X, memory_budget="40%")
    assert in_the_way in str(raised.value)
    assert "no plan can split" in str(raised.value)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert str(copy) == str(raised.value)
    assert (copy.lowest, copy.in_the_way) == (raised.value.lowest, raised.value.in_the_way)
