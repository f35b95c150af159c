"""Annotated functions that change modules of flax.nnx which are their arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tracegrad as tg

pytestmark = pytest.mark.both_jax

X = jax.random.normal(jax.random.key(3), (8, 4))


class Block(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def trained(call, step_by):
    """Returns the losses of three steps and the state of the model behind them."""
    model = Block()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @step_by
    def step(model, optimizer):
        value, gradient = nnx.value_and_grad(lambda m: jnp.mean(call(m, X) ** 2))(model)
        optimizer.update(model, gradient)
        return value

    losses = [float(step(model, optimizer)) for _ in range(3)]
    assert losses[0] != losses[1]  # another mask is drawn
    return losses, jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey)))


@pytest.mark.parametrize("step_by", [lambda f: f, tg.trace, nnx.jit], ids=["plain", "trace", "jit"])
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_a_recomputed_function_changes_a_module_as_by_flax(step_by, policy):
    ours = trained(tg.recompute_grad(lambda m, x: m(x), policy=policy), step_by)
    by_flax = trained(nnx.remat(lambda m, x: m(x), policy=policy), step_by)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(by_flax), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_tape_around_a_recomputed_function_leaves_the_state_of_one_call():
    recomputed, model, plain = tg.recompute_grad(lambda m, x: m(x)), Block(), Block()
    with tg.GradientTape() as tape:
        tape.watch(X)
        y = jnp.sum(recomputed(model, X) ** 3)
    expected = nnx.grad(lambda x, m: jnp.sum(m(x) ** 3))(X, plain)
    np.testing.assert_allclose(tape.gradient(y, X), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], rtol=1e-6)
    assert model.dropout.rngs.count[...] == plain.dropout.rngs.count[...] == 1


def grown(model, x):
    model.scale = nnx.Param(jnp.ones(4))
    return model.linear(x) * model.scale


def test_what_cannot_be_given_to_the_callers_module_is_refused():
    with pytest.raises(TypeError, match=r"'grown'.* changes the structure of a module"):
        tg.recompute_grad(grown)(Block(), X)
    model = Block()
    with pytest.raises(TypeError, match="changes a Variable that is in several of its arguments"):
        tg.recompute_grad(lambda a, b, x: a(x) + b(x))(model, model, X)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, tg.trace, jax.grad])
def test_a_custom_gradient_that_would_lose_what_a_module_assigns_is_refused(around):
    @tg.custom_gradient
    def call(model, x):
        return model(x), lambda dy: (jax.tree.map(jnp.zeros_like, model), dy)

    model = Block()
    with pytest.raises(TypeError, match="assigns arrays in a module"):
        around(lambda x: jnp.sum(call(model, x)))(X)
    with tg.GradientTape() as tape:
        tape.watch(X)
        with pytest.raises(TypeError, match="assigns arrays in a module"):
            call(model, X)
