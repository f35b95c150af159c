"""Modules of flax.nnx as arguments: read like other trees, and never changed in vain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tracegrad as tg
from tracegrad import match, rules

X = jnp.linspace(-1.0, 1.0, 24).reshape(8, 3)
DOUBLE = rules.scale_gradient(match.op("tanh"), 2.0)


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Noisy(Plain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(super().__call__(x)))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def train_step(model, optimizer, x):
    value, gradient = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, gradient)
    return value


def model_and_optimizer():
    model = Plain(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@pytest.mark.parametrize("options", [{}, {"rules": [DOUBLE]}], ids=["plain", "under rules"])
def test_a_train_step_whose_updates_would_be_lost_raises_and_names_them(options):
    step = tg.trace(train_step, **options)
    with pytest.raises(TypeError, match=r"train_step changes model\.linear\.bias.* and \d more"):
        step(*model_and_optimizer(), X)


CHANGING = {
    "statistics and random numbers": (lambda model, x: model(x), r"model\.\w+\..* and 2 more"),
    "the structure": (lambda model, x: model.eval(), r"model \(its structure\)"),
    "a parameter": (
        lambda model, x: model.linear.bias.set_value(x[0, :1] * jnp.ones(4)),
        r"model\.linear\.bias",
    ),
}


@pytest.mark.parametrize("case", CHANGING)
@pytest.mark.parametrize(
    "run",
    [tg.trace, lambda f: tg.rewrite(f), lambda f: lambda *a: tg.graph(f)(*a).to_callable()(*a)],
    ids=["trace", "rewrite", "to_callable"],
)
def test_no_change_is_lost_in_silence(run, case):
    change, paths = CHANGING[case]
    with pytest.raises(TypeError, match=f"changes {paths}.*nnx.split"):
        run(change)(Noisy(nnx.Rngs(0)), X)


def test_what_changes_nothing_runs_as_under_nnx_jit():
    model, evaluated = Plain(nnx.Rngs(0)), Noisy(nnx.Rngs(0))
    evaluated.eval()
    for module in (model, evaluated):
        np.testing.assert_allclose(tg.trace(loss)(module, X), nnx.jit(loss)(module, X), rtol=1e-6)
    step = tg.trace(lambda model, x: nnx.value_and_grad(loss)(model, x), rules=[DOUBLE])
    value, gradient = step(model, X)
    expected, plain = nnx.value_and_grad(loss)(model, X)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, 2 * b, rtol=1e-6)


def test_a_module_that_passes_through_a_jitted_function_is_not_changed():
    model = Plain(nnx.Rngs(0))
    inner = nnx.jit(loss)  # which gives the module's state back
    np.testing.assert_allclose(tg.trace(lambda m, x: inner(m, x))(model, X), loss(model, X))


def test_state_that_is_returned_trains_as_nnx_jit_does():
    model, optimizer = model_and_optimizer()
    graphdef, state = nnx.split((model, optimizer))

    @tg.trace
    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        value = train_step(model, optimizer, x)
        return value, nnx.state((model, optimizer))

    expected = nnx.jit(train_step)
    for _ in range(3):
        value, state = step(state, X)
        np.testing.assert_allclose(value, expected(model, optimizer, X), rtol=1e-5)


def test_programs_of_modules_in_train_mode_can_be_looked_at():
    model = Noisy(nnx.Rngs(0))
    assert "tanh" in str(tg.graph(loss)(model, X))
    assert "tanh" in str(tg.show(loss, model, X))
    assert "recompute plan of loss" in str(tg.plan_recompute(loss, "95%")(model, X))
