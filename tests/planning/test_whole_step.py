"""A memory budget is the step's: a step that holds more than its gradients' plans say so."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import pytest

import tracegrad as tg
from tracegrad.planning import (
    BudgetTooSmall,
    BudgetWarning,
    plan_recompute,
    recompute_to_fit,
)

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


# --------------------------------------------------------------------------------------- step.plan


def test_a_traced_step_shows_the_plan_of_its_latest_trace():
    step = tg.trace(train, memory_budget="60%")
    assert step.plan is None
    assert "budget" not in repr(step)
    step(WEIGHTS, X)
    (gradient,) = step.plan.gradients
    planned = plan_recompute(loss, WEIGHTS, X, memory_budget="60%", argnums=0)
    assert gradient == planned.summary
    assert gradient.held <= gradient.budget < gradient.held_without
    assert gradient.text == str(step.plan)
    assert step.plan.line in repr(step)
    assert "XLA holds" in step.plan.line
    step(WEIGHTS, X[:2048])
    assert step.plan.gradients[0].held < gradient.held


def test_a_loss_shows_the_plan_for_who_differentiates_it():
    traced = tg.trace(loss, memory_budget="60%")
    traced.graph(WEIGHTS, X)
    (gradient,) = traced.plan.gradients
    assert gradient.held <= gradient.budget


def test_a_traced_method_shows_its_plan():
    class Trainer:
        @tg.trace(memory_budget="60%")
        def train(self, weights, x):
            return train(weights, x)

    trainer = Trainer()
    trainer.train(WEIGHTS, X)
    assert trainer.train.plan.line in repr(Trainer.train)


def test_a_step_of_two_gradients_has_two_plans_and_says_what_it_holds_as_a_whole():
    plain = held(tg.trace(two_minibatches))
    step = tg.trace(two_minibatches, memory_budget=int(0.56 * plain))
    with pytest.warns(BudgetWarning):
        step(WEIGHTS, X)
    assert len(step.plan.gradients) == 2
    assert step.plan.held > step.plan.gradients[0].budget
    assert "as a whole" in step.plan.line


@pytest.mark.parametrize("name", ["__call__", "graph"])
def test_a_step_that_failed_leaves_no_plan_to_the_next(name):
    fails = [True]

    def step(weights, x):
        gradients = jax.grad(loss)(weights, x)
        if fails:
            raise RuntimeError("the user's")
        return gradients

    traced = tg.trace(step, memory_budget="60%")
    run = getattr(traced, name)
    with pytest.raises(RuntimeError, match="the user's"):
        run(WEIGHTS, X)
    fails.clear()
    run(WEIGHTS, X)
    assert len(traced.plan.gradients) == 1


def test_a_function_traced_inside_by_the_same_rule_takes_no_plan_of_the_step():
    rule = recompute_to_fit("60%")
    inner = tg.trace(loss, rules=rule)

    def step(weights, x):
        first = jax.grad(loss)(weights, x)
        return first, inner(weights, x), jax.grad(loss)(weights, x * 2)

    tg.trace(step, rules=rule)(WEIGHTS, X)
    assert len(rule.latest.gradients) == 2


def test_a_budget_that_is_kept_anyway_computes_nothing_again():
    traced = tg.trace(train, memory_budget="1GiB")
    traced(WEIGHTS, X)
    (gradient,) = traced.plan.gradients
    assert (gradient.flops, gradient.held) == (0, gradient.held_without)
    assert "0.0% of the forward pass computed again" in repr(traced)


def test_two_functions_with_one_budget_have_each_their_own_plan():
    first, second = (tg.trace(each, memory_budget="60%") for each in (train, gan))
    first(WEIGHTS, X)
    assert second.plan is None
    assert tg.trace(train, memory_budget="60%").plan is first.plan  # they share their programs
